"""Host seconds on cores that others share, with clocks that a test moves, and with a real busy core."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bexp.measure import timestamps
from bexp.measure.timestamps import CoreWatch, CudaMark, HostMark, mark_of, waited_seconds


class Host:
    """Clocks that stand still until a test moves them."""

    def __init__(self) -> None:
        self.wall = self.processor = self.waited = self.reading = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.processor

    def waited_seconds(self) -> float:
        self.wall += self.reading
        self.processor += self.reading
        return self.waited

    def work(self, wall: float, processor: float, waited: float) -> None:
        self.wall += wall
        self.processor += processor
        self.waited += waited


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    monkeypatch.setattr(timestamps, "time", found)
    monkeypatch.setattr(timestamps, "waited_seconds", found.waited_seconds)
    return found


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 2.0), (0.04, 2.0), (0.041, 1.5), (3.0, 1.5)])
def test_the_wall_clock_counts_until_threads_wait_for_cores(host: Host, waited: float, seconds: float) -> None:
    first = HostMark()
    host.work(2.0, 1.5, waited)
    assert first.seconds_until(HostMark()) == pytest.approx(seconds)


def test_a_process_that_waits_for_others_counts_the_wall_clock(host: Host) -> None:
    first = HostMark(alone=False)
    host.work(2.0, 0.5, 1.0)
    assert first.seconds_until(HostMark(alone=False)) == 2.0


def test_a_watch_adds_up_its_intervals(host: Host) -> None:
    watch = CoreWatch()
    assert watch.wait_share is None
    for waited in (0.5, 0.1):
        watch.start()
        host.work(1.0, 1.0, waited)
        watch.stop()
        host.work(5.0, 5.0, 3.0)  # between the intervals
    assert watch.wait_share == pytest.approx(0.3)
    watch.start()
    host.work(1.0, 1.0, 40.0)
    watch.stop()
    assert watch.wait_share == 1.0, "of several threads"


def test_the_kernel_counts_the_waits_of_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timestamps, "TASKS", tmp_path)
    for thread, text in {"1": "7 1500000000 3\n", "2": "8 500000000 3\n", "3": ""}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "4").mkdir()  # it has ended
    assert waited_seconds() == 2.0
    monkeypatch.setattr(timestamps, "TASKS", tmp_path / "none")
    assert waited_seconds() == 0.0


class FakeEvent:
    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self) -> None:
        FakeEvent.now += 250.0
        self.at = FakeEvent.now

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.at is not None
        assert later.at is not None
        return later.at - self.at


def test_cuda_marks_are_recorded_events_and_their_milliseconds_become_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    first, second = CudaMark(), CudaMark()
    assert first.seconds_until(second) == 0.25


def test_a_device_has_its_own_kind_of_mark() -> None:
    assert isinstance(mark_of(torch.device("cpu"))(), HostMark)
    assert isinstance(mark_of(torch.device("cpu"), alone=False)(), HostMark)
    assert mark_of(torch.device("cuda:1")) is CudaMark
