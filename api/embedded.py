"""The embedded service: the same API and the same worker as anywhere, as child processes of a command.

Children live in sessions of their own, so that Ctrl-C in the terminal reaches only the command, which then ends them.
Each also holds a pipe from the command as its stdin: when the command is killed, the pipe closes and they end by
themselves.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from bexp.api.client import Client, ServiceError
from bexp.child_process import module_command, safe_environment
from bexp.storage.worker_ids import worker_prefix

START_SECONDS = 60.0
GRACE_SECONDS = 8.0
TAIL_LINES = 8
NOTHING = "(nothing)"
"""What stands for the end of an empty log."""
EXPLAINED = (2, 3)
"""With these statuses, wrong usage and a service that failed, the last line of the log is a sentence that says why."""
RECORD_START = re.compile(r"^(?:[\d-]{10} [\d:,]+ [A-Z]+ |python -m \w+: error: )")
"""What stands before the sentence: the time and the level of a record, or what argparse writes."""
VERBOSE = ("Traceback (most recent call last)", "usage: ")


def child_environment(database_url: str) -> dict[str, str]:
    """Return this environment with the database's URL. On a command line, other users could read its password."""
    return safe_environment({**os.environ, "BEXP_DATABASE_URL": database_url})


class ChildEndedError(ServiceError):
    """A child process ended by itself. `status` is its exit status, negative for a signal."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


class Child:
    """A process with a log file. It is ended together with its whole process group."""

    def __init__(
        self, name: str, command: list[str], log: Path, *, environment: dict[str, str], pass_fds: tuple[int, ...] = ()
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
                env=environment,
            )

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    def check(self) -> None:
        """Raise ChildEndedError, with the end of the log, if the process has ended."""
        if self._has_ended():
            status = self._process.wait()
            if status in EXPLAINED:
                raise ChildEndedError(f"the embedded {self.name} ended: {self.last_line()}", status)
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            message = "\n".join([f"the embedded {self.name} {how}; {self.log} ends with", *self._tail()])
            raise ChildEndedError(message, status)

    def last_line(self) -> str:
        """Return the last line of its log, without the time and the level."""
        return RECORD_START.sub("", self._tail()[-1])

    def tell(self, line: str) -> None:
        """Write a line to its stdin."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process, which ends its own children."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGTERM)
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def end(self, grace_seconds: float) -> None:
        """Wait for the process to end, then kill what is left of its group."""
        deadline = time.monotonic() + grace_seconds
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        # The system cannot have reused the group id, because the process has not been waited for yet.
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _has_ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _tail(self) -> list[str]:
        """Return the last lines of a log; only the error, if they are a traceback or a usage message."""
        lines = [line.rstrip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if any(line.startswith(VERBOSE) for line in lines):
            lines = [line for line in lines if not line.startswith((" ", *VERBOSE))][-1:]
        return lines[-TAIL_LINES:] or [NOTHING]


class EmbeddedService:
    """An API on a free loopback port and, unless only asked to read, one worker, both on one database.

    Entering starts the processes and raises ServiceError, with the end of the log, when they do not come up; leaving
    ends them. Their logs are deleted unless something went wrong.

    Args:
        database_url: of API and worker.
        with_worker: whether there is one.
        device: what the worker owns, as `bexp worker --device` takes it.
        group: whether it uses its devices together.
        num_devices: without `device`, of how many GPUs it can make use: it takes the largest of these numbers for which
            there are enough, and leaves the others alone. Default: one GPU, with `group` all.
        local_target: the file and the name of the worker's target `local`; the API does not know of it.
    """

    def __init__(
        self,
        database_url: str,
        *,
        with_worker: bool,
        device: str | None = None,
        group: bool = False,
        num_devices: Sequence[int] = (),
        local_target: str | None = None,
    ) -> None:
        self._database_url = database_url
        self._with_worker = with_worker
        self._worker_environment = {} if local_target is None else {"BEXP_LOCAL_TARGET": local_target}
        self._worker_options = ["--device", device] if device is not None else []
        self._worker_options += ["--group"] if group else []
        if num_devices and device is None:
            self._worker_options += ["--num-devices", ",".join(map(str, num_devices))]
        self._children: list[Child] = []
        self.url = ""
        self.log_directory = Path()

    def __enter__(self) -> Self:
        self.log_directory = Path(tempfile.mkdtemp(prefix="bexp-"))
        try:
            self._start()
        except BaseException:  # Ctrl-C too: no process of ours stays behind
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None or not issubclass(kind, ServiceError):
            shutil.rmtree(self.log_directory, ignore_errors=True)

    def adopt(self, job_id: str, *, spares_others: bool = False) -> None:
        """Make the worker run only this exploration, and make the service cancel it if the command is killed.

        With `spares_others`, the service leaves it alone while another worker runs it.
        """
        service, *worker = self._children
        service.tell(f"{job_id} {self._worker_prefix()}" if spares_others else job_id)
        for child in worker:
            child.tell(job_id)

    def owns(self, worker_id: str) -> bool:
        """Whether a worker is the embedded one."""
        return worker_id.startswith(self._worker_prefix())

    def _worker_prefix(self) -> str:
        return worker_prefix(socket.gethostname(), self._children[-1].pid)

    def last_words(self) -> str:
        """Return the last lines of the worker's log."""
        return self._children[-1].last_line()

    def check(self) -> None:
        """Raise ChildEndedError if a child has ended."""
        for child in self._children:
            child.check()

    def stop(self) -> None:
        """End the children: the worker first, so that the API does not disturb its last writes."""
        for child in reversed(self._children):
            child.ask_to_end()
        for child in reversed(self._children):
            child.end(GRACE_SECONDS)
        self._children.clear()

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            command = module_command("bexp.api.embedded_api", str(listener.fileno()))
            command += ["with-worker"] if self._with_worker else []
            self._children.append(self._child("API", command, pass_fds=(listener.fileno(),)))
        if self._with_worker:
            command = module_command("bexp.workers", "--jobs-from-stdin", *self._worker_options)
            self._children.append(self._child("worker", command, more_environment=self._worker_environment))
        self._await_api()

    def _child(
        self,
        name: str,
        command: list[str],
        *,
        pass_fds: tuple[int, ...] = (),
        more_environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        log = self.log_directory / f"{name.lower()}.log"
        environment = {**child_environment(self._database_url), **more_environment}
        return Child(name, command, log, environment=environment, pass_fds=pass_fds)

    def _await_api(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        with Client(self.url, timeout=1.0) as client:
            while not client.is_alive():
                self.check()
                if time.monotonic() > deadline:
                    raise ServiceError(f"the embedded API did not answer within {START_SECONDS:.0f} s")
                time.sleep(0.05)
