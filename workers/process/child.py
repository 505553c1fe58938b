"""One profiler process, seen from its parent: a socket, a process group, and its last output."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import psutil

from bexp.explorer.model.base import Frozen
from bexp.workers.process.protocol import REPLIES, Hello, Open, Reply, encode
from bexp.workers.process.start import StartedProcess

TAIL_LINES = 200
TAIL_LINE_LENGTH = 400
REASON_LINES = 5
"""How many lines of its output say why a process has ended."""
SEND_TIMEOUT_SECONDS = 30.0
REAP_TIMEOUT_SECONDS = 30.0
REAP_TICK_SECONDS = 0.01


class ProcessEndedError(Exception):
    """The profiler process closed its end of the socket: it has ended, or is about to."""


class ProfilerProcess:
    """A profiler process that was started. `hello` is None until the devices are open."""

    def __init__(self, started: StartedProcess) -> None:
        self.hello: Hello | None = None
        self._ranks: tuple[psutil.Process, ...] = ()
        self._popen, ours = started.popen, started.socket
        ours.settimeout(SEND_TIMEOUT_SECONDS)
        self._socket = ours
        self._received = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._drain = threading.Thread(target=self._read_output, name=f"profiler-{self.pid}-output", daemon=True)
        self._drain.start()

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._popen.poll() is None

    def greet(self, hello: Hello) -> None:
        """Note the process's greeting. The ranks that run trials for it end with it, each with its own group."""
        ranks = []
        for pid in hello.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks.append(psutil.Process(pid))
        self.hello, self._ranks = hello, tuple(ranks)

    def open(self, locks: Sequence[int]) -> None:
        """Let the process open its devices. It keeps the descriptors of their locks until it ends.

        Raises:
            ProcessEndedError: the process has ended.
        """
        try:
            socket.send_fds(self._socket, [encode(Open())], locks)
        except OSError as error:
            raise ProcessEndedError(str(error)) from error

    def send(self, command: Frozen) -> None:
        """Write one command.

        Raises:
            ProcessEndedError: the process has ended.
        """
        try:
            self._socket.sendall(encode(command))
        except OSError as error:
            raise ProcessEndedError(str(error)) from error

    def receive(self, timeout_seconds: float) -> Reply | None:
        """Return the next reply, or None if none comes within `timeout_seconds`.

        Raises:
            ProcessEndedError: the process has ended, and all its replies have been read.
        """
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._received:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._socket], [], [], remaining)[0]:
                return None
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                raise ProcessEndedError(str(error)) from error
            if not data:
                raise ProcessEndedError("the socket is closed")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return REPLIES.validate_json(line)

    def private_bytes(self) -> int:
        """Return the resident bytes, without shared libraries. If there are ranks, those of the largest rank."""
        return max(_private_bytes(pid) for pid in [rank.pid for rank in self._ranks] or [self.pid])

    def kill(self) -> None:
        """End the process and all its children at once. Any thread may call this, also more than once."""
        if self._popen.returncode is None:  # not reaped, so that no other process can have its id
            _kill_group(self.pid)
        for rank in self._ranks:
            if rank.is_running():  # false if another process has the rank's id now
                _kill_group(rank.pid)

    def end(self, grace_seconds: float = 0.0) -> int:
        """Kill, reap and close; return the exit status (negative: the signal that ended the process).

        The process first has `grace_seconds` to end by itself, so that its own exit status is seen.

        Raises:
            TimeoutError: the process does not end, for instance because the driver hangs.
        """
        if grace_seconds > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_seconds)
        self.kill()
        try:
            status = self._popen.wait(REAP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"profiler process {self.pid} does not end, even on SIGKILL") from error
        deadline = time.monotonic() + REAP_TIMEOUT_SECONDS
        while lingering := [rank.pid for rank in self._ranks if not _has_ended(rank)]:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"profiler processes {lingering} do not end, even on SIGKILL")
            time.sleep(REAP_TICK_SECONDS)
        self._drain.join(1.0)
        self._socket.close()
        if self._popen.stdout is not None and not self._drain.is_alive():
            self._popen.stdout.close()
        return status

    def last_output(self) -> str:
        """Return the last lines of the output as one line; of a fatal error, its first line and first frames."""
        printed = list(self._tail)
        fatal = next((i for i, line in enumerate(printed) if line.startswith("Fatal Python error")), None)
        return " | ".join(printed[-REASON_LINES:] if fatal is None else printed[fatal : fatal + REASON_LINES])

    def _read_output(self) -> None:
        stream = self._popen.stdout
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            while line := stream.readline(TAIL_LINE_LENGTH):
                if text := line.decode(errors="replace").strip():
                    self._tail.append(text)


def _private_bytes(pid: int) -> int:
    """Resident bytes that are not shared; 0 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 2 else 0


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _has_ended(process: psutil.Process) -> bool:
    """Return whether nothing is left of a process, except perhaps its exit status.

    A process counts as a zombie when its first thread has ended. Its other threads may still hold memory.
    """
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True
