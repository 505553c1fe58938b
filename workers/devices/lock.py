"""A host-wide lock for each device, so that two profilers never share one: their timings would disturb each other."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

POLL_SECONDS = 0.1


class DeviceBusyError(Exception):
    """Another profiler held the device for as long as the caller was willing to wait."""


class DeviceLock:
    """An flock on a file named after the device's key.

    The profiler process inherits the descriptor, so that the kernel releases the lock when the last of worker and
    profiler is gone, however they ended. The file holds the owner's process id, for people; it is never removed, since
    removing a lock file that another process has just opened would let both have it.
    """

    def __init__(self, key: str, *, directory: Path | None = None) -> None:
        folder = directory if directory is not None else Path(tempfile.gettempdir())
        self._path = folder / f"bexp-device-{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock"
        self._key = key
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The locked file, to be inherited by the profiler process."""
        assert self._descriptor is not None, "the lock is not held"
        return self._descriptor

    def acquire(
        self,
        *,
        timeout_seconds: float | None = None,
        on_wait: Callable[[str], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for the device; does nothing if it is held already.

        `on_wait` is told once why there is a wait. Returns False if `cancelled()` became true meanwhile.

        Raises:
            DeviceBusyError: the device was not free within `timeout_seconds` (null: waits as long as it takes).
        """
        if self._descriptor is not None:
            return True
        descriptor = self._open()
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        told = False
        try:
            while not _try_lock(descriptor):
                reason = f"{self._key} is in use by another profiler{self._owner()}"
                if not told and on_wait is not None:
                    on_wait(f"Waiting for the device: {reason}")
                told = True
                if cancelled():
                    return False
                if deadline is not None and time.monotonic() >= deadline:
                    raise DeviceBusyError(reason)
                time.sleep(POLL_SECONDS)
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
        with contextlib.suppress(PermissionError):  # another user created it a moment ago
            os.fchmod(descriptor, 0o666)  # other users' workers must be able to lock it, whatever this one's umask
        return descriptor

    def _owner(self) -> str:
        pid = self._path.read_text(errors="replace").strip()
        return f" (process {pid})" if pid.isdecimal() else ""


class DeviceLocks:
    """The locks of several devices, taken in one order by everyone: two sets that overlap never wait for each other."""

    def __init__(self, keys: Iterable[str], *, directory: Path | None = None) -> None:
        self._locks = [DeviceLock(key, directory=directory) for key in sorted(set(keys))]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The locked files, to be inherited by the profiler process."""
        return tuple(lock.descriptor for lock in self._locks)

    def acquire(
        self,
        *,
        timeout_seconds: float | None = None,
        on_wait: Callable[[str], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """As `DeviceLock.acquire`, for all of them: none is held if one cannot be had in time."""
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
        """Release each."""
        for lock in self._locks:
            lock.release()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
