"""One profiler process, as its parent sees it: a socket, a process group, and what it last printed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from explorer.frozen import Frozen
from workers.protocol import REPLIES, Reply, encode

TAIL_LINES = 200
TAIL_LINE_LENGTH = 400
SEND_TIMEOUT_SECONDS = 30.0
REAP_TIMEOUT_SECONDS = 30.0


class ProcessEndedError(Exception):
    """The profiler process closed its end of the socket: it is dead, or about to be."""


class ProfilerProcess:
    """`python -m workers.profiler`, in a session of its own so that it ends together with all its children.

    `inherited` is a descriptor that it keeps open for as long as it lives (the device's lock).
    """

    def __init__(self, device: str, *, environment: Mapping[str, str], inherited: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "workers.profiler",
                    *("--device", device),
                    *("--socket", str(theirs.fileno())),
                    *("--parent", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), inherited),
                start_new_session=True,
                env=dict(environment),
            )
        ours.settimeout(SEND_TIMEOUT_SECONDS)
        self._socket = ours
        self._received = b""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._drain = threading.Thread(target=self._read_output, name=f"profiler-{self.pid}-output", daemon=True)
        self._drain.start()

    @property
    def pid(self) -> int:
        """Process id, and the id of its group."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def send(self, order: Frozen) -> None:
        """Write one order.

        Raises:
            ProcessEndedError: nobody reads it.
        """
        try:
            self._socket.sendall(encode(order))
        except OSError as error:
            raise ProcessEndedError(str(error)) from error

    def receive(self, timeout_seconds: float) -> Reply | None:
        """The next reply, or None if none came within `timeout_seconds`.

        Raises:
            ProcessEndedError: the process is gone and everything it said has been read.
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
        """Resident memory that is its own, without the pages of shared libraries; 0 when it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        except OSError:
            return 0
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 2 else 0

    def kill(self) -> None:
        """End the process and all its children at once. Safe to call from any thread, and again."""
        if self._popen.returncode is None:  # not reaped, so that the id cannot belong to anyone else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, grace_seconds: float = 0.0) -> int:
        """Kill, reap and close; returns the exit status (negative: the signal that ended it).

        A process that is ending by itself gets `grace_seconds` to do so, to learn how it ended.

        Raises:
            TimeoutError: the kernel does not let it go, as with a hung driver.
        """
        if grace_seconds > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_seconds)
        self.kill()
        try:
            status = self._popen.wait(REAP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"profiler process {self.pid} does not end, even on SIGKILL") from error
        self._drain.join(1.0)
        self._socket.close()
        if self._popen.stdout is not None and not self._drain.is_alive():
            self._popen.stdout.close()
        return status

    def last_words(self, lines: int = 5) -> str:
        """The end of what it printed, on one line; of a fatal error its head and first frames."""
        printed = list(self._tail)
        fatal = next((i for i, line in enumerate(printed) if line.startswith("Fatal Python error")), None)
        return " | ".join(printed[-lines:] if fatal is None else printed[fatal : fatal + lines])

    def _read_output(self) -> None:
        stream = self._popen.stdout
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            while line := stream.readline(TAIL_LINE_LENGTH):
                if text := line.decode(errors="replace").strip():
                    self._tail.append(text)
