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
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from explorer.spec.base import Frozen
from workers.process.protocol import REPLIES, Reply, encode

TAIL_LINES = 200
TAIL_LINE_LENGTH = 400
SEND_TIMEOUT_SECONDS = 30.0
REAP_TIMEOUT_SECONDS = 30.0
REAP_TICK_SECONDS = 0.01


class ProcessEndedError(Exception):
    """The profiler process closed its end of the socket: it is dead, or about to be."""


class ProfilerProcess:
    """`python -m workers.profiler`, in a session of its own so that it ends together with all its children.

    For several devices it is `workers.profiler.distributed`, whose ranks lead process groups of their own; `adopt` tells
    which. `inherited` are descriptors that it keeps open for as long as it lives (the devices' locks).
    """

    def __init__(self, devices: Sequence[str], *, environment: Mapping[str, str], inherited: Sequence[int]) -> None:
        self._ranks: tuple[psutil.Process, ...] = ()
        several = len(devices) > 1
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "workers.profiler.distributed" if several else "workers.profiler",
                    *("--devices" if several else "--device", ",".join(devices)),
                    *("--socket", str(theirs.fileno())),
                    *("--parent", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), *inherited),
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

    def adopt(self, pids: Sequence[int]) -> None:
        """Watch over these processes, and end them with their own groups."""
        ranks = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks.append(psutil.Process(pid))
        self._ranks = tuple(ranks)

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
        """Resident memory that is its own, without the pages of shared libraries; of ranks, that of the largest."""
        return max(_private_bytes(pid) for pid in [rank.pid for rank in self._ranks] or [self.pid])

    def kill(self) -> None:
        """End the process and all its children at once. Safe to call from any thread, and again."""
        if self._popen.returncode is None:  # not reaped, so that the id cannot belong to anyone else
            _kill_group(self.pid)
        for rank in self._ranks:
            if rank.is_running():  # this process, and no other that has its id now
                _kill_group(rank.pid)

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


def _private_bytes(pid: int) -> int:
    """0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 2 else 0


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _has_ended(process: psutil.Process) -> bool:
    """Whether nothing of a process is left but, perhaps, its exit status for whoever inherited it.

    A process counts as a zombie when its first thread has ended; the others may still hold its memory.
    """
    try:
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return True
