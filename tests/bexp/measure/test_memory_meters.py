from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from bexp.measure.memory_meters import CudaMeter, HostMeter, LiveStorages, byte_meter


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
    asked: list[tuple[str, torch.device]] = []

    def answer(name: str, value: int) -> Callable[[torch.device], int]:
        def ask(of: torch.device) -> int:
            asked.append((name, of))
            return value

        return ask

    answers = {"memory_allocated": 11, "max_memory_allocated": 22, "reset_peak_memory_stats": 0}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer(name, value))
    device = torch.device("cuda:1")
    with byte_meter(device, ()) as meter:
        assert isinstance(meter, CudaMeter)
        assert (meter.level(), meter.peak()) == (11, 22)
        meter.reset_peak()
    assert asked == [(name, device) for name in answers]


KIB = 1024


def kib(n: int) -> torch.Tensor:
    return torch.zeros(n * KIB, dtype=torch.uint8)


def test_what_existed_before_is_not_counted_even_when_written_to() -> None:
    before = kib(8)
    with LiveStorages([before]) as storages:
        before.add_(1)
        assert before.view(2, -1).sum() > 0
        assert storages.allocated_bytes == 0


def test_a_level_survives_leaving_the_mode() -> None:
    storages = LiveStorages()
    with storages:
        a = kib(4)
    del a
    assert storages.allocated_bytes == 0


def test_a_storage_counts_with_its_present_size() -> None:
    before = kib(8)
    resize = torch.UntypedStorage.resize_
    with LiveStorages([before]) as storages:
        a = kib(4)
        a.untyped_storage().resize_(0)
        assert storages.allocated_bytes == 0
        a.untyped_storage().resize_(6 * KIB)
        before.untyped_storage().resize_(16 * KIB)
        assert (storages.allocated_bytes, storages.peak_bytes) == (6 * KIB, 6 * KIB)
        del a
        assert storages.allocated_bytes == 0
    assert torch.UntypedStorage.resize_ is resize


def test_a_tensor_that_wraps_others_counts_as_what_it_wraps() -> None:
    with LiveStorages() as storages:
        wrapper = TwoTensor(kib(2), kib(2))
        assert storages.allocated_bytes == 4 * KIB
        twice = wrapper * 2
        assert storages.allocated_bytes == 8 * KIB
        del wrapper, twice
        assert storages.allocated_bytes == 0
