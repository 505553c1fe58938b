"""Starts a service's processes by fork from one that has imported what they need, in milliseconds instead of seconds.

A process that is started so leads a session of its own, and has its own id, descriptors, threads and exit status, as
one that the interpreter starts. Only its imports are there already.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import IO, Protocol

PRELOADED = ("workers.__main__", "api.cli", "api.serve", "uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on")
POLL_SECONDS = 0.01


class StartedProcess(Protocol):
    """What `subprocess.Popen` and `ForkedProcess` have in common."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ForkServer:
    """The process that forks. All methods may be called from any thread.

    Args:
        environment: of the server and of what it starts.
        log: where all of them write.
    """

    def __init__(self, environment: Mapping[str, str], log: IO[bytes]) -> None:
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.fork_server"],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )

    def start(self, module: str, *arguments: str) -> ForkedProcess:
        """Do what `python -m module arguments` does."""
        return ForkedProcess(self, int(self._ask("start", module, *arguments)))

    def poll(self, pid: int) -> int | None:
        """Return the exit status of a process that has ended (negative: of the signal), which then is forgotten."""
        status = self._ask("poll", pid)
        return None if status == "None" else int(status)

    def end(self) -> None:
        """End the server; what still runs is killed."""
        self._popen.communicate()

    def _ask(self, *command: object) -> str:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with self._lock:
            self._popen.stdin.write(json.dumps(command).encode() + b"\n")
            self._popen.stdin.flush()
            return self._popen.stdout.readline().decode().strip()


class ForkedProcess:
    """A process that a fork server has started, with the methods of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
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


def main() -> None:
    """Serve commands from standard input until it is closed. In a forked process this returns when that is done."""
    for name in PRELOADED:
        import_module(name)
    sys.modules.pop("workers.__main__")  # each process runs it anew
    assert threading.active_count() == 1, "a thread is not there after a fork"
    gc.collect()
    gc.freeze()  # the pages of what is imported stay shared
    children: set[int] = set()
    for line in iter(sys.stdin.buffer.readline, b""):
        command, *arguments = json.loads(line)
        if command == "start":
            pid = os.fork()
            if pid == 0:
                return _become(*arguments)
            children.add(pid)
            reply: int | None = pid
        else:
            reply = _status(arguments[0])
            children -= set() if reply is None else {arguments[0]}
        sys.stdout.write(f"{reply}\n")
        sys.stdout.flush()
    for pid in children:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(module: str, *arguments: str) -> None:
    """Run a module as the interpreter would, with its output in the log and nothing on its input."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
