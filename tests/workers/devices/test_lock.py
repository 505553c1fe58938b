import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bexp.workers.devices.lock import DeviceBusyError, DeviceLock


def test_two_locks_of_one_device_exclude_each_other(tmp_path: Path) -> None:
    first, second = DeviceLock("GPU-1", directory=tmp_path), DeviceLock("GPU-1", directory=tmp_path)
    assert first.acquire()
    assert first.acquire(), "held already"
    reasons: list[str] = []
    told = rf"GPU-1 is in use by another profiler \(process {os.getpid()} of user \S+ since 20[\d: -]+: \S*python"
    with pytest.raises(DeviceBusyError, match=told):
        second.acquire(timeout_seconds=0.15, on_wait=reasons.append)
    assert len(reasons) == 1
    first.release()
    assert second.acquire(timeout_seconds=0.0)
    second.release()


def test_a_full_disk_keeps_nobody_from_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    holder = DeviceLock("cpu", directory=tmp_path)
    assert holder.acquire()
    with pytest.raises(DeviceBusyError, match="cpu is in use by another profiler"):
        DeviceLock("cpu", directory=tmp_path).acquire(timeout_seconds=0.0)
    holder.release()


def test_other_devices_are_free(tmp_path: Path) -> None:
    locks = [DeviceLock(key, directory=tmp_path) for key in ("GPU-1", "GPU-2", "cpu")]
    assert all(lock.acquire(timeout_seconds=0.0) for lock in locks)
    for lock in locks:
        lock.release()


def test_a_wait_can_be_given_up(tmp_path: Path) -> None:
    holder = DeviceLock("cpu", directory=tmp_path)
    holder.acquire()
    given_up = threading.Event()
    threading.Timer(0.2, given_up.set).start()
    assert not DeviceLock("cpu", directory=tmp_path).acquire(cancelled=given_up.is_set)
    holder.release()


def test_the_lock_lives_as_long_as_a_process_that_inherited_it(tmp_path: Path) -> None:
    holder = DeviceLock("cpu", directory=tmp_path)
    holder.acquire()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(holder.descriptor,))
    holder.release()
    waiting = DeviceLock("cpu", directory=tmp_path)
    with pytest.raises(DeviceBusyError):
        waiting.acquire(timeout_seconds=0.0)
    child.kill()
    child.communicate(timeout=60)
    assert waiting.acquire(timeout_seconds=60.0)
    waiting.release()
