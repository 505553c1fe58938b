from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from bexp.measure.memory_meters import CudaMeter, HostMeter, byte_meter

CPU = torch.device("cpu")


def test_the_host_meter_runs_eagerly_only_where_a_compiler_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    stances: list[str] = []

    class Stance:
        def __init__(self, stance: str) -> None:
            self.stance = stance

        def __enter__(self) -> None:
            stances.append(self.stance)

        def __exit__(self, *_: object) -> None:
            stances.append("left")

    monkeypatch.setattr(torch.compiler, "set_stance", Stance)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with HostMeter([]):
        pass
    assert stances == []
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    with HostMeter([]):
        assert stances == ["force_eager"]
    assert stances == ["force_eager", "left"]


def test_the_cuda_meter_asks_the_allocator_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:1")
    asked: list[torch.device] = []

    def answer(value: int) -> object:
        def ask(of: torch.device) -> int:
            asked.append(of)
            return value

        return ask

    monkeypatch.setattr(torch.cuda, "memory_allocated", answer(11))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", answer(22))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", answer(0))
    with byte_meter(device, ()) as meter:
        assert isinstance(meter, CudaMeter)
        assert (meter.level(), meter.peak()) == (11, 22)
        meter.reset_peak()
    assert asked == [device] * 3
