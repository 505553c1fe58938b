"""The start of a profiler process. The module imports little, so that a worker can start one before all else."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence

from bexp.child_process import module_command, safe_environment
from bexp.workers.process.environment import profiler_environment
from bexp.workers.process.kernel_cache import kernel_cache


def process_environment(given: Mapping[str, str], devices: Sequence[str]) -> dict[str, str]:
    """Return the variables of a process that measures `devices`, with the folders of compiled kernels."""
    return kernel_cache(given) | profiler_environment(given, devices)


def uses_spares(devices: Sequence[str]) -> bool:
    """Return whether a process may start while another uses the devices. On the CPU it would disturb what is timed."""
    return len(devices) == 1 and devices[0] != "cpu"


class StartedProcess:
    """`python -m bexp.workers.profiler`, in a session of its own, so that it ends together with all its children.

    Several devices take `bexp.workers.profiler.distributed`, whose ranks lead process groups of their own. The kernel
    ends the process with the thread that made this object.
    """

    def __init__(self, devices: Sequence[str], environment: Mapping[str, str]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                module_command(
                    "bexp.workers.profiler.distributed" if len(devices) > 1 else "bexp.workers.profiler",
                    *("--devices", ",".join(devices)),
                    *("--socket", str(theirs.fileno())),
                    *("--parent", str(os.getpid())),
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=safe_environment(environment),
            )
