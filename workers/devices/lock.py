"""A host-wide lock for each device. Two profilers on one device would disturb each other's timings."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

POLL_SECONDS = 0.1
MOST_SHOWN = 120
"""Characters of a command line."""
FOLDER_VARIABLE = "BEXP_LOCK_DIRECTORY"


def lock_folder(environment: Mapping[str, str]) -> Path:
    """Return the directory of the locks: BEXP_LOCK_DIRECTORY, else the temporary directory, which all users share."""
    return Path(environment.get(FOLDER_VARIABLE) or tempfile.gettempdir())


class DeviceBusyError(Exception):
    """Another profiler held the device for the whole time that the caller would wait."""


class DeviceLock:
    """An flock on a file named after the device's key.

    The profiler process inherits the descriptor. The kernel therefore releases the lock when both worker and profiler
    have ended, however they ended. The file holds the owner's process id, for people to read. The file is never
    removed: another process may just have opened it, and a third would then lock a new file of the same name.
    """

    def __init__(self, key: str, *, directory: Path) -> None:
        self._path = directory / f"bexp-device-{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock"
        self._key = key
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The descriptor of the locked file, for the profiler process to inherit."""
        assert self._descriptor is not None, "the lock is not held"
        return self._descriptor

    def acquire(
        self,
        *,
        timeout_seconds: float | None = None,
        on_wait: Callable[[str], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for the device; does nothing if this lock is held already.

        `on_wait` is called once, with the reason for the wait. Returns False if `cancelled()` became true meanwhile.

        Raises:
            DeviceBusyError: the device was not free within `timeout_seconds` (None: there is no limit).
        """
        if self._descriptor is not None:
            return True
        descriptor = self._open()
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        has_told = False
        try:
            while not _try_lock(descriptor):
                reason = f"{self._key} is in use by another profiler{self._holder()}"
                if not has_told and on_wait is not None:
                    on_wait(reason)
                has_told = True
                if cancelled():
                    return False
                if deadline is not None and time.monotonic() >= deadline:
                    raise DeviceBusyError(reason)
                time.sleep(POLL_SECONDS)
            with contextlib.suppress(OSError):  # a full disk keeps nobody from the device
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            self._descriptor, descriptor = descriptor, -1
            return True
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def release(self) -> None:
        """Close this process's descriptor; a profiler that still lives keeps the lock until it ends."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._path, flags)
        except FileNotFoundError:
            pass
        descriptor = os.open(self._path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):  # another user has just created it
            os.fchmod(descriptor, 0o666)  # other users' workers must be able to lock it, whatever this one's umask
        return descriptor

    def _holder(self) -> str:
        """Return the process that holds the lock, as far as it can be known: ` (process 7 of user ann since ...)`."""
        pid = self._path.read_text(errors="replace").strip()
        if not pid.isdecimal():
            return ""
        try:
            holder = psutil.Process(int(pid))
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._path.stat().st_mtime))
            command = " ".join(holder.cmdline())[:MOST_SHOWN]
            return f" (process {pid} of user {holder.username()} since {since}: {command})"
        except (psutil.Error, OSError, KeyError):  # it has just ended, or may not be looked at
            return f" (process {pid})"


class DeviceLocks:
    """The locks of several devices. Everyone takes them in the same order, so that two sets cannot block each other."""

    def __init__(self, keys: Iterable[str], *, directory: Path) -> None:
        self._locks = [DeviceLock(key, directory=directory) for key in sorted(set(keys))]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the locked files, for the profiler process to inherit."""
        return tuple(lock.descriptor for lock in self._locks)

    def acquire(
        self,
        *,
        timeout_seconds: float | None = None,
        on_wait: Callable[[str], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Take all locks, as `DeviceLock.acquire` does. If one cannot be taken in time, none is held."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        acquired = False
        try:
            for lock in self._locks:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not lock.acquire(timeout_seconds=left, on_wait=on_wait, cancelled=cancelled):
                    return False
            acquired = True
            return True
        finally:
            if not acquired:
                self.release()

    def release(self) -> None:
        """Release every lock."""
        for lock in self._locks:
            lock.release()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
