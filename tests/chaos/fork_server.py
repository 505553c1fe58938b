"""Starts a service's processes by fork from one that has imported what they need, in milliseconds instead of seconds.

A process that is started so leads a session of its own, and has its own id, descriptors, threads and exit status, as
one that the interpreter starts. Only its imports are there already.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO

PRELOADED = (
    "bexp.workers.__main__",
    "bexp.workers.process.profiler",
    "bexp.workers.serving",
    "bexp.workers.replay.profiler",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "sqlalchemy.dialects.postgresql.psycopg",
    "psycopg",
    "bexp.api.cli",
    "bexp.api.serve",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.lifespan.on",
)
POLL_SECONDS = 0.01
MESSAGE_BYTES, MAX_DESCRIPTORS = 1 << 16, 16
HIGH_DESCRIPTOR = 500
"""Above all descriptors that a process has when it begins."""


class ForkServer:
    """The process that forks. All methods may be called from any thread.

    Args:
        environment: of the server and of what it starts.
        log: where all of them write.
        preloaded: the modules that it imports.
    """

    def __init__(self, environment: Mapping[str, str], log: IO[bytes], preloaded: Sequence[str] = PRELOADED) -> None:
        self._lock = threading.Lock()
        self._log = log
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.fork_server", *preloaded],
                env=dict(environment),
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        """The parent of all processes that are started."""
        return self._popen.pid

    def start(
        self, module: str, *arguments: str, output: int | None = None, descriptors: Sequence[int] = ()
    ) -> ForkedProcess:
        """Do what `python -m module arguments` does.

        Args:
            module: what to run.
            arguments: of its command line.
            output: where it writes; default: the log.
            descriptors: what stays open in the process, under the same numbers.
        """
        given = [self._log.fileno() if output is None else output, *descriptors]
        return ForkedProcess(self, int(self._ask("start", list(descriptors), module, *arguments, descriptors=given)))

    def poll(self, pid: int) -> int | None:
        """Return the exit status of a process that has ended (negative: of the signal), which then is forgotten."""
        status = self._ask("poll", pid)
        return None if status == "None" else int(status)

    def end(self) -> None:
        """End the server; what still runs is killed."""
        self._socket.close()
        self._popen.wait()

    def _ask(self, *command: object, descriptors: Sequence[int] = ()) -> str:
        with self._lock:
            reply = b""
            with suppress(ConnectionError):
                socket.send_fds(self._socket, [json.dumps(command).encode()], list(descriptors))
                reply = self._socket.recv(MESSAGE_BYTES)
            if not reply:
                raise RuntimeError(f"the fork server ended with status {self._popen.wait()}: its log says why")
            return reply.decode()


@cache
def shared_server(*preloaded: str) -> ForkServer:
    """The server with these modules, for all of this process; it ends with it, and writes to its standard error."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    with os.fdopen(os.dup(2), "wb") as log:
        server = ForkServer({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, log, preloaded)
    atexit.register(server.end)
    return server


class ForkedProcess:
    """A process that a fork server has started, with the methods of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return the exit status, or null while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.poll(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended. Its id stays its own until `poll` has seen the end."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


StartedProcess = subprocess.Popen[bytes] | ForkedProcess


def main() -> None:
    """Serve the commands on the socket that is standard input until it is closed.

    In a forked process this returns when its module has ended.
    """
    for name in sys.argv[1:]:
        import_module(name)
    assert threading.active_count() == 1, "a thread is not there after a fork"
    assert not _open_gpus(), "a process that has used a GPU must not fork"
    gc.collect()
    gc.freeze()  # the pages of what is imported stay shared
    children: set[int] = set()
    commands = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    while True:
        message, received, _, _ = socket.recv_fds(commands, MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            break
        command, *arguments = json.loads(message)
        if command == "start":
            pid = _fork(commands)
            if pid == 0:
                return _become(received, *arguments)
            for descriptor in received:
                os.close(descriptor)
            children.add(pid)
            reply: int | None = pid
        else:
            reply = _status(arguments[0])
            children -= set() if reply is None else {arguments[0]}
        commands.send(str(reply).encode())
    for pid in children:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _fork(commands: socket.socket) -> int:
    """Return the id of a new process when it leads a group, which its client may kill from then on; there, return 0."""
    waiting, leading = os.pipe()
    if pid := os.fork():
        os.close(leading)
        os.read(waiting, 1)  # ends when the process has closed its end
    else:
        os.setsid()
        commands.close()
        os.close(leading)
    os.close(waiting)
    return pid


def _open_gpus() -> list[str]:
    """Return the device files of NVIDIA's driver that this process has open."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(path.readlink()))
    return [name for name in found if name.startswith("/dev/nvidia")]


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(received: Sequence[int], numbers: Sequence[int], module: str, *arguments: str) -> None:
    """Run a module as the interpreter would, with nothing on its input.

    The first descriptor received becomes its output, and the others get the numbers that they have in the client.
    """
    output, *others = [_move(descriptor, HIGH_DESCRIPTOR + i) for i, descriptor in enumerate(received)]
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    for descriptor, number in zip(others, numbers, strict=True):
        _move(descriptor, number)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _move(descriptor: int, number: int) -> int:
    os.dup2(descriptor, number)
    os.close(descriptor)
    return number


if __name__ == "__main__":
    main()
