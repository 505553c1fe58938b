"""The worker that a command starts for its exploration.

It lives in a session of its own, so that Ctrl-C in the terminal reaches only the command, which then ends it. It also
holds a pipe from the command as its stdin: when the command is killed, the pipe closes and the worker ends by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from bexp.child_process import module_command, safe_environment
from bexp.client.errors import ServiceError

GRACE_SECONDS = 8.0
TAIL_LINES = 8
EXPLAINED = (2, 3)
"""With these statuses (wrong usage, a worker that failed) the last line of the log is a sentence with the reason."""
RECORD_START = re.compile(r"^(?:[\d-]{10} [\d:,]+ [A-Z]+ |bexp worker: )")
"""The text before the sentence: the time and the level of a record, or the prefix of argparse."""
VERBOSE = ("Traceback (most recent call last)", "usage: ")


def child_environment(database_url: str) -> dict[str, str]:
    """Return this environment with the database's URL, whose password other users could read on a command line."""
    return safe_environment({**os.environ, "BEXP_DATABASE_URL": database_url})


class WorkerEndedError(ServiceError):
    """The worker ended before its exploration. `status` is its exit status, negative for a signal."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class LocalWorker:
    """A worker process for one exploration, and its log file. It is ended together with its whole process group.

    Args:
        job_id: the exploration; it may be submitted later.
        name: of the worker, for which the exploration is submitted.
        options: of `python -m bexp.workers`, to choose devices.
        database_url: the database of the exploration.
        more_environment: variables for the worker alone.
    """

    def __init__(
        self,
        job_id: str,
        name: str,
        options: Sequence[str],
        *,
        database_url: str,
        more_environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bexp-"))
        self.log = self._folder / "worker.log"
        try:
            with self.log.open("wb") as output:
                self._process = subprocess.Popen(
                    module_command("bexp.workers", "--job", job_id, "--name", name, *options),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**child_environment(database_url), **more_environment},
                )
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    def check(self) -> bool:
        """Return whether the process runs. Raises WorkerEndedError, with the end of the log, if it has failed."""
        if not self.has_ended:
            return True
        if (status := self._process.wait()) == 0:
            return False
        lines = self._tail()
        if status in EXPLAINED:
            raise WorkerEndedError(f"the worker ended: {RECORD_START.sub('', lines[-1])}", status)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        raise WorkerEndedError("\n".join([f"the worker {how}; {self.log} ends with", *lines]), status)

    def stop(self, *, keeps_log: bool) -> None:
        """Ask the process to end, which ends its own children; then kill the rest of its group."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGTERM)
        with suppress(OSError):
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.close()
        deadline = time.monotonic() + GRACE_SECONDS
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(0.02)
        # The system cannot have reused the group id, because the process has not been waited for yet.
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if not keeps_log:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _tail(self) -> list[str]:
        """Return the last lines of the log; only the error, if they are a traceback or a usage message."""
        lines = [line.rstrip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if any(line.startswith(VERBOSE) for line in lines):
            lines = [line for line in lines if not line.startswith((" ", *VERBOSE))][-1:]
        return lines[-TAIL_LINES:] or ["(nothing)"]
