"""A real profiler process on the CPU whose device others want too: what it holds, and what it finds afterwards."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bexp.workers.devices.lock import DeviceBusyError, DeviceLocks
from bexp.workers.process.interface import ProfilerError
from bexp.workers.process.profiler import Profiler
from tests.forked_profilers import forked_profilers
from tests.waits import PATIENCE_SECONDS, wait_until
from tests.workers.process.profilers import ENVIRONMENT, works
from tests.workers.profiler.samples import REQUEST

pytestmark = pytest.mark.slow(together="forked")


@pytest.fixture
def profiler(tmp_path: Path) -> Iterator[Profiler]:
    with forked_profilers(), Profiler("cpu", environment=ENVIRONMENT, lock_directory=tmp_path) as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[DeviceLocks]:
    """What another process has of the same device."""
    locks = DeviceLocks(["cpu"], directory=tmp_path)
    yield locks
    locks.release()


def spare_of(profiler: Profiler) -> int | None:
    spare = profiler._process._spare
    return None if spare is None else spare.pid


def test_a_profiler_at_rest_has_neither_the_device_nor_its_process_and_starts_with_a_spare(
    profiler: Profiler, other: DeviceLocks
) -> None:
    hardware, process = profiler.hardware(), profiler._process.current
    profiler.rest()
    assert process is not None
    assert not process.alive
    assert profiler.pid is None
    spare = spare_of(profiler)
    assert spare is not None
    other.try_acquire()
    assert not profiler.take()
    assert f"cpu is in use by process {os.getpid()} of user " in (profiler.held_by or "")
    assert other.are_awaited
    profiler.rest()
    assert (profiler.held_by, other.are_awaited) == (None, False)
    assert spare_of(profiler) == spare, "a rest without the device starts nothing beside who has it"
    other.release()
    assert profiler.take()
    profiler.begin(REQUEST)
    assert profiler.pid == spare
    assert works(profiler)
    assert profiler.hardware() is hardware, "it is measured once"


def test_a_spare_does_not_hold_the_device_and_a_process_that_opened_it_does(
    profiler: Profiler, other: DeviceLocks
) -> None:
    process = profiler._process.current
    assert process is not None
    opened = [entry.read_text() for entry in Path(f"/proc/{process.pid}/fdinfo").iterdir()]
    (locked,) = (text for text in opened if "FLOCK" in text)
    (flags,) = re.findall(r"^flags:\s+(\d+)$", locked, re.MULTILINE)
    assert int(flags, 8) & os.O_CLOEXEC, "no compiler of its own keeps the device"
    profiler._process.locks.release()  # as if this process had ended alone
    with pytest.raises(DeviceBusyError):
        other.acquire(timeout_seconds=0.0)
    os.kill(process.pid, signal.SIGKILL)
    assert other.acquire(timeout_seconds=60.0)
    other.release()
    assert profiler.take()
    profiler._process.start_spare()
    profiler._process.locks.release()
    assert spare_of(profiler) is not None
    other.try_acquire()


def test_a_spare_would_disturb_who_takes_the_device_on_the_cpu(profiler: Profiler, other: DeviceLocks) -> None:
    with pytest.raises(DeviceBusyError):
        other.try_acquire()
    assert profiler.is_awaited
    profiler.rest()
    assert spare_of(profiler) is None
    other.try_acquire()
    profiler.prepare()
    assert spare_of(profiler) is None
    profiler._uses_spares = True  # as on a GPU
    profiler.prepare()
    assert spare_of(profiler) is not None
    assert profiler.held_by


def test_a_process_that_does_not_end_keeps_the_device(
    profiler: Profiler, other: DeviceLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = profiler._process.current
    assert process is not None

    def hang(grace_seconds: float = 0.0) -> int:
        raise TimeoutError("it hangs")

    with monkeypatch.context() as hanging:
        hanging.setattr(process, "end", hang)
        with pytest.raises(ProfilerError, match="it hangs"):
            profiler.rest()
    assert not profiler.take(), "not for this profiler either"
    with pytest.raises(DeviceBusyError, match=f"in use by process {process.pid} "):
        other.acquire(timeout_seconds=0.0)
    process.end()
    assert profiler.take()


def test_a_device_that_changed_at_rest_is_measured_again_and_its_job_does_not_go_on(
    profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = profiler.hardware()
    monkeypatch.setattr(profiler, "_hardware", before.model_copy(update={"device_name": "NVIDIA H100 MIG 1g.10gb"}))
    profiler.rest()
    with pytest.raises(ProfilerError, match=r"cpu has changed .*: it was NVIDIA H100 MIG 1g.10gb"):
        profiler.start()
    profiler.start()
    assert profiler.hardware().fingerprint == before.fingerprint
    profiler.begin(REQUEST)
    assert works(profiler)
    process = profiler._process.current
    assert process is not None
    versions = before.versions.model_copy(update={"torch": "1.0"})
    monkeypatch.setattr(profiler, "_hardware", before.model_copy(update={"versions": versions}))
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.alive)
    with pytest.raises(ProfilerError, match="cpu has changed"):
        works(profiler)
    with pytest.raises(ProfilerError, match="before begin"):
        works(profiler)


def test_two_profilers_have_the_device_one_after_the_other(profiler: Profiler, tmp_path: Path) -> None:
    with forked_profilers():
        second = Profiler("cpu", environment=ENVIRONMENT, lock_directory=tmp_path)
        started = threading.Thread(target=second.start)
        started.start()
        wait_until(lambda: profiler.is_awaited)
        assert second.pid is None
        profiler.rest()
        started.join(PATIENCE_SECONDS)
        assert second.pid is not None
        assert second.held_by is None
        assert not profiler.take()
        second.close()
        assert profiler.take()
