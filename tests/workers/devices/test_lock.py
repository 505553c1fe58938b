"""Who has a device, and who says so: the kernel, whatever other users write or run."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bexp.workers.devices import holder
from bexp.workers.devices.lock import DeviceBusyError, DeviceLocks, lock_folder
from tests.waits import PATIENCE_SECONDS, wait_until


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


@pytest.mark.parametrize(
    "leave",
    [lambda path: path.touch(mode=0o600), lambda path: path.symlink_to("/dev/null"), Path.mkdir, os.mkfifo],
    ids=["file of one user", "link", "folder", "pipe"],
)
def test_what_others_leave_under_its_name_keeps_nobody_out(tmp_path: Path, leave: Callable[[Path], object]) -> None:
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


HOLD = """\
import os, subprocess, sys
from pathlib import Path
from bexp.workers.devices.lock import DeviceLocks
folder, user, leaves = sys.argv[1:4]
if user:
    os.setgroups([])
    os.setuid(int(user))
locks = DeviceLocks(["GPU-1"], directory=Path(folder))
locks.try_acquire()
if leaves:
    heir = subprocess.Popen(["sleep", "600"], pass_fds=locks.descriptors, stdout=subprocess.DEVNULL)
    print(heir.pid, flush=True)
    os._exit(0)
print("held", flush=True)
input()
"""
NOBODY = 65534


@contextmanager
def held(folder: Path, *more: str, user: str = "", leaves: str = "") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(folder), user, leaves, *more]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        yield other
        if other.poll() is None:
            other.communicate("\n", timeout=PATIENCE_SECONDS)


def why_busy(folder: Path) -> str:
    with pytest.raises(DeviceBusyError) as found:
        DeviceLocks(["GPU-1"], directory=folder).acquire(timeout_seconds=0.0)
    return str(found.value)


def line_of(other: subprocess.Popen[str]) -> str:
    assert other.stdout is not None
    return other.stdout.readline().strip()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[DeviceLocks]:
    """The lock of this process."""
    locks = DeviceLocks(["GPU-1"], directory=tmp_path)
    locks.acquire()
    yield locks
    locks.release()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as /tmp; pytest's own is closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.mark.usefixtures("mine")
def test_no_file_that_everybody_may_write_names_the_holder(tmp_path: Path) -> None:
    told = why_busy(tmp_path)
    assert told.startswith(f"GPU-1 is in use by process {os.getpid()} of user ")
    for path in tmp_path.iterdir():
        assert path.read_bytes() == b"", "nothing is written"
        path.write_text("1 root")
        os.utime(path, (0, 0))
    assert why_busy(tmp_path) == told


@pytest.mark.parametrize("locks", [None, "", "1: FLOCK  ADVISORY  WRITE 0 {file} 0 EOF\n"])
def test_a_holder_that_a_container_or_a_system_without_proc_hides_is_another_process(
    tmp_path: Path, mine: DeviceLocks, monkeypatch: pytest.MonkeyPatch, locks: str | None
) -> None:
    file = holder._kernel_name(mine.descriptors[0])
    read = Path.read_text

    def read_text(path: Path, *options: str) -> str:
        if locks is None:
            raise FileNotFoundError("/proc")
        return locks.format(file=file) if str(path) == "/proc/locks" else read(path, *options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert why_busy(tmp_path) == "GPU-1 is in use by another process"


def test_the_lock_of_another_file_is_not_mistaken(tmp_path: Path, mine: DeviceLocks) -> None:
    other = DeviceLocks(["GPU-2"], directory=tmp_path)
    other.acquire()
    (path,) = (path for path in tmp_path.iterdir() if os.path.samestat(path.stat(), os.fstat(mine.descriptors[0])))
    mine.release()
    with path.open() as unlocked:
        assert holder.find_holder(unlocked.fileno()) is None
    other.release()


def test_the_process_that_has_the_lock_of_one_that_has_ended_is_named_with_it(tmp_path: Path) -> None:
    with held(tmp_path, leaves="yes") as taker:
        heir = psutil.Process(int(line_of(taker)))
        try:
            wait_until(lambda: psutil.Process(taker.pid).status() == psutil.STATUS_ZOMBIE)
            told = rf"GPU-1 is in use by process {heir.pid} of user \S+, started 20[\d: -]+: sleep 600; "
            told += f"it was given the lock by process {taker.pid}, which has ended"
            assert re.fullmatch(told, why_busy(tmp_path))
            taker.wait(PATIENCE_SECONDS)
            assert re.fullmatch(told, why_busy(tmp_path))
        finally:
            heir.kill()
    free = DeviceLocks(["GPU-1"], directory=tmp_path)
    assert free.acquire(timeout_seconds=60.0)
    free.release()


def test_a_process_with_the_id_of_one_that_has_ended_is_not_mistaken_for_it(
    tmp_path: Path, mine: DeviceLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = holder._kernel_name(mine.descriptors[0])
    read = Path.read_text
    with subprocess.Popen(["sleep", "600"]) as innocent:

        def read_text(path: Path, *options: str) -> str:
            said = f"1: FLOCK  ADVISORY  WRITE {innocent.pid} {file} 0 EOF\n"
            return said if str(path) == "/proc/locks" else read(path, *options)

        try:
            monkeypatch.setattr(Path, "read_text", read_text)
            told = why_busy(tmp_path)
        finally:
            innocent.kill()
    assert told.startswith(f"GPU-1 is in use by process {os.getpid()} of user ")
    assert told.endswith(f"; it was given the lock by process {innocent.pid}")


def test_the_password_of_a_database_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder, "MOST_SHOWN", 10_000)
    with held(tmp_path, "postgresql://bexp:p@ss@host/db") as other:
        assert line_of(other) == "held"
        told = why_busy(tmp_path)
    assert f"process {other.pid} of user " in told
    assert "postgresql://***@host/db" in told


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process needs root")
def test_two_users_exclude_each_other_and_the_wait_names_the_other(shared: Path) -> None:
    with held(shared, user=str(NOBODY)) as other:
        assert line_of(other) == "held"
        user = pwd.getpwuid(NOBODY).pw_name
        told = rf"GPU-1 is in use by process {other.pid} of user {user}, started 20[\d: -]+: \S*python.*"
        assert re.fullmatch(told, why_busy(shared), flags=re.DOTALL)
    mine = DeviceLocks(["GPU-1"], directory=shared)
    assert mine.acquire(timeout_seconds=60.0), "the other's file is everybody's"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(shared), str(NOBODY), ""], stderr=subprocess.PIPE, text=True
    ) as refused:
        assert refused.stderr is not None
        assert f"DeviceBusyError: GPU-1 is in use by process {os.getpid()} of user root, " in refused.stderr.read()
    mine.release()
