"""Who holds a lock: the kernel says so, whatever other users write or run."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bexp.workers.devices import holder
from bexp.workers.devices.lock import DeviceBusyError, DeviceLocks
from tests.waits import PATIENCE_SECONDS, wait_until

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
