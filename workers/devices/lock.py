"""A host-wide lock for each device. Two profilers on one device would disturb each other's timings."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bexp.workers.devices.holder import Holder, find_holder

POLL_SECONDS = 0.25
FOLDER_VARIABLE = "BEXP_LOCK_DIRECTORY"


def lock_folder(environment: Mapping[str, str]) -> Path:
    """Return the directory of the locks: BEXP_LOCK_DIRECTORY, else /tmp, because not all users share a TMPDIR."""
    return Path(environment.get(FOLDER_VARIABLE) or "/tmp")  # noqa: S108 - FileLock passes over what others left there


class DeviceBusyError(Exception):
    """Another process has a device, or is the next to have it; `holder` is None if the kernel does not say which."""

    def __init__(self, reason: str, holder: Holder | None = None) -> None:
        super().__init__(reason)
        self.holder = holder


class FileLock:
    """An flock on a file, which the kernel releases when all processes with its descriptor have ended.

    The file is never removed: another process may just have opened it, and a third would then lock a new file of the
    same name. Nothing is written into the file, because every user may lock it and could so deceive another.

    Another user may have left something else under the name of the file. That keeps nobody out: everybody takes the
    next name.
    """

    def __init__(self, stem: Path) -> None:
        self.descriptor: int | None = None
        self._stem = stem

    def try_acquire(self) -> bool:
        """Return whether this holds the lock, which is taken if nobody has it."""
        if self.descriptor is None:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                self.descriptor = descriptor
        return self.descriptor is not None

    def release(self) -> None:
        """Close this process's descriptor; a process that was given it keeps the lock until it ends."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def find_holder(self) -> Holder | None:
        """Return who holds the lock; None if nobody does, or if that is not known."""
        descriptor = self._open()
        try:
            return find_holder(descriptor)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        for number in itertools.count():
            path = Path(f"{self._stem}-{number}.lock" if number else f"{self._stem}.lock")
            if not os.path.lexists(path):
                _create(path)
            if _is_for_everybody(path):
                break
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


class DeviceLock:
    """The lock of a device, and the turn of the one that has it next.

    A process that does not get the device keeps the turn, if nobody else has it. A process that gives the device back
    and wants it again needs the turn first. So two processes that always want the device have it in turns.
    """

    def __init__(self, key: str, *, directory: Path) -> None:
        stem = directory / f"bexp-device-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        self.device = FileLock(stem)
        self._key = key
        self._turn = FileLock(Path(f"{stem}-turn"))

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for this lock's device."""
        if not self._turn.try_acquire():
            return True
        self._turn.release()
        return False

    def try_acquire(self) -> None:
        """Take the device, or at least the turn.

        Raises:
            DeviceBusyError: another process has the device, or the turn.
        """
        if self.device.descriptor is not None:
            return
        has_turn = self._turn.try_acquire()
        if not has_turn or not self.device.try_acquire():
            holder = self.device.find_holder()
            if holder is None and not has_turn:
                holder = self._turn.find_holder()
            raise DeviceBusyError(f"{self._key} is in use by {holder.text if holder else 'another process'}", holder)
        self._turn.release()

    def release(self) -> None:
        """Release the device, or the turn."""
        self._turn.release()
        self.device.release()


class DeviceLocks:
    """The locks of several devices, always taken in the same order, so that two sets cannot block each other."""

    def __init__(self, keys: Iterable[str], *, directory: Path) -> None:
        self._locks = [DeviceLock(key, directory=directory) for key in sorted(set(keys))]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the locked files, for a process that must not outlive the locks."""
        return tuple(lock.device.descriptor for lock in self._locks if lock.device.descriptor is not None)

    @property
    def are_held(self) -> bool:
        """Whether every lock is held."""
        return len(self.descriptors) == len(self._locks)

    @property
    def are_awaited(self) -> bool:
        """Whether every lock is held, and somebody waits for one of them."""
        return self.are_held and any(lock.is_awaited for lock in self._locks)

    def try_acquire(self) -> None:
        """Take all locks, without waiting. What is taken is kept, also if another one is not free.

        Raises:
            DeviceBusyError: another process has one of them, or waited for it before.
        """
        for lock in self._locks:
            lock.try_acquire()

    def acquire(
        self,
        *,
        timeout_seconds: float | None = None,
        on_wait: Callable[[str], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait for the devices; does nothing if all locks are held already. If one cannot be taken, none is held.

        `on_wait` is called once, with the reason for the wait. Returns False if `cancelled()` became true meanwhile.

        Raises:
            DeviceBusyError: a device was not free within `timeout_seconds` (None: there is no limit).
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        has_told = False
        try:
            while True:
                try:
                    self.try_acquire()
                except DeviceBusyError as error:
                    if not has_told and on_wait is not None:
                        on_wait(str(error))
                    has_told = True
                    if deadline is not None and time.monotonic() >= deadline:
                        raise
                else:
                    return True
                if cancelled():
                    return False
                time.sleep(POLL_SECONDS)
        finally:
            if not self.are_held:
                self.release()

    def release(self) -> None:
        """Release every lock."""
        for lock in self._locks:
            lock.release()


def _create(path: Path) -> None:
    """Create a file that every user may lock as soon as it has its name, whatever this process's umask."""
    descriptor, unnamed = tempfile.mkstemp(prefix=".bexp-device-", dir=path.parent)
    try:
        os.fchmod(descriptor, 0o666)
        with contextlib.suppress(FileExistsError):  # another process has just created it
            os.link(unnamed, path)
    finally:
        os.close(descriptor)
        Path(unnamed).unlink()


def _is_for_everybody(path: Path) -> bool:
    """Return whether every user may lock `path`. The answer is the same for all users, so that they agree on a name."""
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) and mode & 0o666 == 0o666
