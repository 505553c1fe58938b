"""A host-wide lock for each device. Two profilers on one device would disturb each other's timings."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from bexp.explorer.spec.spelling import shortened

POLL_SECONDS = 0.1
MOST_SHOWN = 120
"""Characters of a command line."""
FOLDER_VARIABLE = "BEXP_LOCK_DIRECTORY"

_OWNER = re.compile(r"(?P<pid>\d{1,7}) (?P<user>[\w.@$-]+)")


def lock_folder(environment: Mapping[str, str]) -> Path:
    """Return the directory of the locks: BEXP_LOCK_DIRECTORY, else /tmp. All users share that, but not each TMPDIR."""
    return Path(environment.get(FOLDER_VARIABLE) or "/tmp")  # noqa: S108 - DeviceLock passes over what others left there


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock, and what is known of it: `process 7 of user ann since ...: python ...`."""

    pid: int
    text: str


class DeviceBusyError(Exception):
    """Another profiler held the device for the whole time that the caller would wait; `holder` is None if not known."""

    def __init__(self, reason: str, holder: Holder | None = None) -> None:
        super().__init__(reason)
        self.holder = holder


class DeviceLock:
    """An flock on a file named after the device's key.

    The profiler process inherits the descriptor. The kernel therefore releases the lock when both worker and profiler
    have ended, however they ended. The file names the owner, by process id and user. The file is never removed:
    another process may just have opened it, and a third would then lock a new file of the same name.

    Every user may lock the file. What another user has left under its name, and is no such file, keeps nobody out:
    everybody passes it over, and takes the next name.
    """

    def __init__(self, key: str, *, directory: Path) -> None:
        self._stem = directory / f"bexp-device-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
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
                holder = _holder(descriptor)
                reason = f"{self._key} is in use by another profiler{f' ({holder.text})' if holder else ''}"
                if not has_told and on_wait is not None:
                    on_wait(reason)
                has_told = True
                if cancelled():
                    return False
                if deadline is not None and time.monotonic() >= deadline:
                    raise DeviceBusyError(reason, holder)
                time.sleep(POLL_SECONDS)
            with contextlib.suppress(OSError):  # a full disk keeps nobody from the device
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {psutil.Process().username()}".encode(), 0)
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
        for number in itertools.count():
            path = Path(f"{self._stem}-{number}.lock" if number else f"{self._stem}.lock")
            if not os.path.lexists(path):
                _create(path)
            if _is_for_everybody(path):
                break
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


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
    """Whether `path` is a file that every user may lock. All users find the same, so that they agree on a name."""
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) and mode & 0o666 == 0o666


def _holder(descriptor: int) -> Holder | None:
    told = _OWNER.fullmatch(os.pread(descriptor, 100, 0).decode(errors="replace"))
    if told is None:
        return None
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.fstat(descriptor).st_mtime))
    pid = int(told["pid"])
    owner = f"process {told['pid']} of user {told['user']} since {since}"
    try:
        command = shortened(" ".join(psutil.Process(pid).cmdline()), MOST_SHOWN)
        return Holder(pid, f"{owner}: {''.join(filter(str.isprintable, command))}")  # another user chose it
    except (psutil.Error, OSError):  # it has just ended, or may not be looked at
        return Holder(pid, owner)
