import errno
import os
import pwd
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bexp.workers.devices.lock import DeviceBusyError, DeviceLock, lock_folder
from tests.waits import PATIENCE_SECONDS


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
    DeviceLock("GPU-1", directory=tmp_path).acquire()
    (path,) = tmp_path.iterdir()
    path.unlink()
    leave(path)
    first, second = DeviceLock("GPU-1", directory=tmp_path), DeviceLock("GPU-1", directory=tmp_path)
    assert first.acquire(timeout_seconds=0.0)
    with pytest.raises(DeviceBusyError):
        second.acquire(timeout_seconds=0.0)
    first.release()


def test_a_lock_is_for_every_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        lock = DeviceLock("GPU-1", directory=tmp_path)
        lock.acquire()
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()  # what was there before it had its name is gone
    assert path.stat().st_mode & 0o777 == 0o666
    lock.release()


def test_all_users_find_the_same_folder() -> None:
    assert lock_folder({"TMPDIR": "/tmp/user/1000"}) == lock_folder({"TMPDIR": "/tmp/user/1001"}) == Path("/tmp")
    assert lock_folder({"BEXP_LOCK_DIRECTORY": "/run/bexp"}) == Path("/run/bexp")


def test_a_forged_owner_is_not_shown(tmp_path: Path) -> None:
    holder = DeviceLock("cpu", directory=tmp_path)
    holder.acquire()
    (path,) = tmp_path.iterdir()
    path.write_text("1 \x1b[2Jann")
    with pytest.raises(DeviceBusyError, match=r"another profiler$"):
        DeviceLock("cpu", directory=tmp_path).acquire(timeout_seconds=0.0)
    holder.release()


HOLD = """\
import os, sys
from pathlib import Path
from bexp.workers.devices.lock import DeviceLock
os.setgroups([])
os.setuid(65534)
DeviceLock("GPU-1", directory=Path(sys.argv[1])).acquire(timeout_seconds=0.0)
print("held", flush=True)
input()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process needs root")
def test_two_users_exclude_each_other_and_the_wait_names_the_other() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folder is closed to other users
        folder = Path(name)
        folder.chmod(0o1777)
        command = [sys.executable, "-c", HOLD, name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            mine = DeviceLock("GPU-1", directory=folder)
            user = pwd.getpwuid(65534).pw_name
            with pytest.raises(
                DeviceBusyError, match=rf"\(process {other.pid} of user {user} since 20[\d: -]+: \S*python"
            ):
                mine.acquire(timeout_seconds=0.0)
            other.communicate("\n", timeout=PATIENCE_SECONDS)
        assert mine.acquire(timeout_seconds=PATIENCE_SECONDS), "the other's file is everybody's"
        mine.release()
