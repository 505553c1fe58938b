from __future__ import annotations

import pytest
import torch

from bexp.measure.timestamps import CudaMark, HostMark, mark_of


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
