import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bexp.workers.devices.lock import DeviceBusyError, DeviceLocks, lock_folder
from tests.waits import PATIENCE_SECONDS


def test_two_locks_of_one_device_exclude_each_other(tmp_path: Path) -> None:
    first, second = DeviceLocks(["GPU-1"], directory=tmp_path), DeviceLocks(["GPU-1"], directory=tmp_path)
    assert first.acquire()
    assert first.acquire(), "held already"
    reasons: list[str] = []
    told = rf"^GPU-1 is in use by process {os.getpid()} of user \S+, started 20[\d: -]+: \S*python"
    with pytest.raises(DeviceBusyError, match=told):
        second.acquire(timeout_seconds=0.15, on_wait=reasons.append)
    assert len(reasons) == 1
    first.release()
    assert second.acquire(timeout_seconds=0.0)
    second.release()


def test_the_lock_lives_as_long_as_a_process_that_inherited_it(tmp_path: Path) -> None:
    holder = DeviceLocks(["cpu"], directory=tmp_path)
    holder.acquire()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=holder.descriptors)
    holder.release()
    waiting = DeviceLocks(["cpu"], directory=tmp_path)
    with pytest.raises(DeviceBusyError):
        waiting.acquire(timeout_seconds=0.0)
    child.kill()
    child.communicate(timeout=PATIENCE_SECONDS)
    assert waiting.acquire(timeout_seconds=PATIENCE_SECONDS)
    waiting.release()


def leave_file_of_one_user(path: Path) -> None:
    path.touch(mode=0o600)


def leave_link(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("leave", [leave_file_of_one_user, leave_link, Path.mkdir, os.mkfifo])
def test_what_another_user_leaves_under_its_name_keeps_nobody_out(
    tmp_path: Path, leave: Callable[[Path], object]
) -> None:
    DeviceLocks(["GPU-1"], directory=tmp_path).acquire()
    for path in list(tmp_path.iterdir()):
        path.unlink()
        leave(path)
    first, second = DeviceLocks(["GPU-1"], directory=tmp_path), DeviceLocks(["GPU-1"], directory=tmp_path)
    assert first.acquire(timeout_seconds=0.0)
    with pytest.raises(DeviceBusyError):
        second.acquire(timeout_seconds=0.0)
    first.release()


def test_a_lock_is_for_every_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        lock = DeviceLocks(["GPU-1"], directory=tmp_path)
        lock.acquire()
    finally:
        os.umask(before)
    files = list(tmp_path.iterdir())  # what was there before they had their names is gone
    assert [path.stat().st_mode & 0o777 for path in files] == [0o666] * 2
    lock.release()


def test_all_users_find_the_same_folder() -> None:
    assert lock_folder({"TMPDIR": "/tmp/user/1000"}) == lock_folder({"TMPDIR": "/tmp/user/1001"}) == Path("/tmp")
    assert lock_folder({"BEXP_LOCK_DIRECTORY": "/run/bexp"}) == Path("/run/bexp")


def test_who_gives_the_device_back_leaves_it_to_who_waits(tmp_path: Path) -> None:
    """Each wants the device all the time, and looks at it more often or more rarely than the other."""
    first, second, third = (DeviceLocks(["GPU-1"], directory=tmp_path) for _ in range(3))
    first.try_acquire()
    assert not first.are_awaited
    for having, waiting in [(first, second), (second, first)] * 2:
        for _ in range(3):
            with pytest.raises(DeviceBusyError):
                waiting.try_acquire()
        assert having.are_awaited
        with pytest.raises(DeviceBusyError):
            third.try_acquire()
        having.release()
        for _ in range(3):
            with pytest.raises(DeviceBusyError, match=rf"^GPU-1 is in use by process {os.getpid()} "):
                having.try_acquire()  # it is free, and not for this one
        waiting.try_acquire()
        assert not waiting.are_awaited
    first.release()
    third.try_acquire()
    third.release()


def test_who_does_not_wait_any_more_leaves_the_device_to_others(tmp_path: Path) -> None:
    first, second = (DeviceLocks(["GPU-1"], directory=tmp_path) for _ in range(2))
    first.try_acquire()
    with pytest.raises(DeviceBusyError):
        second.acquire(timeout_seconds=0.0)
    assert not first.are_awaited
    assert not second.acquire(cancelled=lambda: True)
    assert not first.are_awaited
    with pytest.raises(DeviceBusyError):
        second.try_acquire()
    assert first.are_awaited
    second.release()
    first.release()
    first.try_acquire()
    first.release()


def test_several_devices_are_had_together_and_no_two_sets_block_each_other(tmp_path: Path) -> None:
    pair, reverse = (DeviceLocks(keys, directory=tmp_path) for keys in (["GPU-1", "GPU-2"], ["GPU-2", "GPU-1"]))
    one = DeviceLocks(["GPU-2"], directory=tmp_path)
    one.try_acquire()
    for waiting in (pair, reverse):
        with pytest.raises(DeviceBusyError, match=r"GPU-[12] is in use"):
            waiting.try_acquire()
    assert (pair.are_held, one.are_awaited) == (False, True)
    one.release()
    pair.try_acquire()
    assert pair.are_held
    assert pair.are_awaited
    with pytest.raises(DeviceBusyError):
        reverse.try_acquire()
    pair.release()
    reverse.try_acquire()
    reverse.release()
