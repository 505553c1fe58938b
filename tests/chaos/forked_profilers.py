"""Lets the profilers of this process start their own processes by fork, from a server that has imported torch.

This saves the seconds of the import, and nothing else: a forked process opens the device, makes its context and reads
its commands as one that the interpreter starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import IO, Any

from bexp.child_process import module_command, safe_environment
from bexp.workers.process import start as starting
from tests.chaos.fork_server import ForkedProcess, ForkServer

MODULE = "tests.chaos.faulty_profiler"
PRELOADED = (
    "bexp.workers.profiler.device",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "bexp.workers.targets.transformers.target",
)


class Starts:
    """Starts processes with faults in place of profiler processes.

    The interpreter starts `cold_share` of them, the fork server the others.
    """

    def __init__(self, environment: Mapping[str, str], log: IO[bytes], cold_share: float, rng: Random) -> None:
        self._cold_share = cold_share
        self._rng = rng
        variables = safe_environment(starting.process_environment(environment, ("cpu",)))
        self.server = ForkServer(variables, log, PRELOADED) if cold_share < 1 else None

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """Do what `subprocess.Popen` does with the command line and the options of a profiler process."""
        if self.server is None or self._rng.random() < self._cold_share:
            return subprocess.Popen(command, **options)
        return fork_profiler(self.server, command, **options)

    def start_other(self, module: str, *arguments: str) -> Any:
        """Start a module that writes to `stdout`, as `subprocess.Popen` does."""
        if self.server is None:
            return subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE)
        return _fork(self.server, module, *arguments)

    def end(self) -> None:
        """End the server and all that it has started."""
        if self.server is not None:
            self.server.end()


@contextmanager
def faulty_profilers(starts: Starts) -> Iterator[None]:
    """Have the profilers of this process start their processes so."""
    patched: Any = starting
    original = patched.module_command
    patched.module_command = lambda _, *arguments: module_command(MODULE, *arguments)
    try:
        with profilers_started_by(starts.start):
            yield
    finally:
        patched.module_command = original


@contextmanager
def profilers_started_by(start: Callable[..., Any]) -> Iterator[None]:
    """Have `start`, in place of `subprocess.Popen`, start the processes of this process's profilers."""
    patched: Any = starting
    original = patched.subprocess
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    patched.subprocess = SimpleNamespace(Popen=start, **names)
    try:
        yield
    finally:
        patched.subprocess = original


def fork_profiler(server: ForkServer, command: Sequence[str], **options: Any) -> ForkedProcess:
    """Do what `subprocess.Popen` does with the command line and the options of a profiler process.

    The environment is the server's.
    """
    at = command.index("-m") + 1
    arguments = list(command[at + 1 :])
    arguments[arguments.index("--parent") + 1] = str(server.pid)
    return _fork(server, command[at], *arguments, descriptors=options["pass_fds"])


def _fork(server: ForkServer, module: str, *arguments: str, descriptors: Sequence[int] = ()) -> ForkedProcess:
    read, write = os.pipe()
    try:
        process = server.start(module, *arguments, output=write, descriptors=descriptors)
    finally:
        os.close(write)
    process.stdout = os.fdopen(read, "rb")
    return process
