"""Which loader of data of accelerate's loop a trial sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bexp.tune import accelerate_loop
from bexp.tune.accelerate_loop import _resized
from bexp.tune.data_loader import SizedLoader
from bexp.tune.link import SIZE, CannotSetError

NUMBERS = TensorDataset(torch.arange(10))
ACCELERATOR = SimpleNamespace(split_batches=False, num_processes=2, process_index=0, gradient_accumulation_steps=1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(accelerate_loop, "asked", found)
    monkeypatch.delenv(SIZE, raising=False)
    return found


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream(), batch_size=2), "reads a stream"),
        (DataLoader(NUMBERS, batch_sampler=[[0, 1]]), "has a sampler of whole batches"),
    ],
)
def test_the_loader_of_an_evaluation_does_not_take_the_place_of_one_that_cannot_be_set(
    loader: DataLoader[Any], why: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotSetError, match=rf"the first loader of data {why}: put {{micro_batch_size}} where"):
        _resized(ACCELERATOR, loader, [], is_compiled=False)
    monkeypatch.setenv(SIZE, "4")
    evaluation, first = DataLoader(NUMBERS, batch_size=4), list[DataLoader[Any]]()
    for each in (loader, evaluation):
        assert _resized(ACCELERATOR, each, first, is_compiled=False) is each
    assert asked == {}
    assert isinstance(_resized(ACCELERATOR, evaluation, [], is_compiled=False), SizedLoader), "it is the first one"
