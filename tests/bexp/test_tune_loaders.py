"""The loaders that a trial sets, of accelerate's and of Lightning's, which `make test-frameworks` has itself."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from bexp.tune import accelerate_loop, applied_lightning, lightning_loop, promise
from bexp.tune.accelerate_loop import _resized as _resized_by_accelerate
from bexp.tune.clock import ACCUMULATION
from bexp.tune.data_loader import SizedLoader
from bexp.tune.lightning_loop import _kept, _num_steps, _resized
from bexp.tune.link import SIZE, CannotSetError
from tests.tune_commands.with_a_loader import Texts, pad


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.zeros(10, 1))


class GradientAccumulationScheduler:
    """As Lightning's is called."""


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for loop in (accelerate_loop, lightning_loop):
        monkeypatch.setattr(loop, "asked", found)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(SIZE, raising=False)
    return found


def trainer(*, automatic: bool = True, callbacks: tuple[Any, ...] = ()) -> Any:
    module = nn.Linear(2, 2)
    module.automatic_optimization = automatic  # type: ignore[assignment]  # as Lightning's modules have it
    own = {"callbacks": callbacks, "accumulate_grad_batches": 8, "world_size": 1, "max_steps": -1, "max_epochs": 3}
    return SimpleNamespace(global_rank=0, lightning_module=module, **own)


def loader(dataset: Dataset[Any], **named: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, **named)


NUMBERS = TensorDataset(torch.arange(10))


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "data", "steps"),
    [(-1, 3, 100, 12), (7, 3, 100, 7), (70, 3, 100, 12), (-1, -1, 100, None), (-1, None, 100, None), (5, 3, None, 5)],
)
def test_the_steps_of_the_commands_own_run_are_known_if_its_end_is(
    max_steps: int, max_epochs: int | None, data: int | None, steps: int | None
) -> None:
    training = trainer()
    training.max_steps, training.max_epochs = max_steps, max_epochs
    loaded = loader(Stream() if data is None else TensorDataset(torch.arange(data)))
    assert _num_steps(training, loaded) == steps, "8 micro-batches of 4 a step"


def test_all_micro_batches_are_full_if_there_is_less_data(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIZE, "16")
    training = trainer()
    found = _resized(training, loader(NUMBERS, shuffle=True), None)
    assert {len(numbers) for (numbers,) in found} == {16}
    assert len(found) >= 400
    assert (asked["micro_batch_size"], asked["grad_accum_steps"]) == (4, 8), "what the command says"
    assert training.accumulate_grad_batches == ACCUMULATION


def test_the_longest_samples_come_first(asked: dict[str, Any]) -> None:
    texts = Texts(50)
    longest = max(len(texts[place]["input_ids"]) for place in range(50))
    found = _resized(trainer(), loader(texts, shuffle=True, collate_fn=pad), None)
    widths = [batch["input_ids"].shape[1] for batch in islice(found, 8)]
    assert widths[:4] == [longest] * 4
    assert min(widths) < longest
    assert asked["lengths"]["samples"]["longest"] == longest


def test_a_stream_gets_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE, "5")
    assert [len(batch) for batch in _resized(trainer(), loader(Stream()), None)] == [5, 5]


@pytest.mark.parametrize(
    ("training", "data", "why"),
    [
        (trainer(automatic=False), loader(NUMBERS), "it steps its optimizers by hand"),
        (trainer(callbacks=(GradientAccumulationScheduler(),)), loader(NUMBERS), "its accumulation changes"),
        (trainer(), DataLoader(Stream(), batch_size=None), "its loader of data has no batch_size"),
        (trainer(), [torch.zeros(4)], "its loader of data has no batch_size"),
    ],
)
def test_what_cannot_be_set_says_so_unless_the_size_stands_in_the_command(
    training: Any, data: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotSetError, match=rf"because {why}.*: put {{micro_batch_size}} where"):
        _resized(training, data, None)
    monkeypatch.setenv(SIZE, "16")
    assert _resized(training, data, None) is data
    assert training.accumulate_grad_batches == 8


def test_a_second_loader_cannot_be_set() -> None:
    training = trainer()
    _resized(training, loader(NUMBERS), None)
    with pytest.raises(CannotSetError, match="several loaders"):
        _resized(training, loader(NUMBERS), None)


def test_a_loader_that_makes_its_own_batches_has_the_size_that_its_module_states(asked: dict[str, Any]) -> None:
    own = DataLoader(NUMBERS, batch_sampler=BatchSampler(SequentialSampler(NUMBERS), 3, drop_last=False))
    assert _resized(trainer(), own, 3) is own
    assert asked["micro_batch_size"] == 3


def test_callbacks_that_write_are_left_out_and_others_stay() -> None:
    kinds = {name: type(name, (), {}) for name in ("Checkpoint", "ProgressBar", "LearningRateMonitor")}
    own = type("EachHour", (kinds["Checkpoint"],), {})
    monitor = kinds["LearningRateMonitor"]()
    assert _kept([own(), kinds["ProgressBar"](), monitor]) == [monitor]
    assert _kept(own()) == []


@pytest.mark.parametrize("data", [NUMBERS, Stream()])
def test_a_loader_that_runs_with_the_answer_gets_its_size(data: Dataset[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE, "5")
    monkeypatch.setattr(promise, "takers", [])
    own = loader(data)
    assert applied_lightning._resized(own) is own
    assert [len(batch[0]) if isinstance(batch, list) else len(batch) for batch in own] == [5, 5]
    assert len(promise.takers) == 1


def test_what_has_no_size_has_not_taken_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE, "5")
    monkeypatch.setattr(promise, "takers", [])
    applied_lightning._resized(DataLoader(Stream(), batch_size=None))
    assert promise.takers == []


ACCELERATOR = SimpleNamespace(split_batches=False, num_processes=2, process_index=0, gradient_accumulation_steps=1)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Numbers(), batch_size=2), "reads a stream"),
        (DataLoader(NUMBERS, batch_sampler=[[0, 1]]), "has a sampler of whole batches"),
    ],
)
def test_the_loader_of_an_evaluation_does_not_take_the_place_of_one_that_cannot_be_set(
    loader: DataLoader[Any], why: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotSetError, match=rf"the first loader of data {why}: put {{micro_batch_size}} where"):
        _resized_by_accelerate(ACCELERATOR, loader, [], is_compiled=False)
    monkeypatch.setenv(SIZE, "4")
    evaluation, seen = DataLoader(NUMBERS, batch_size=4), list[DataLoader[Any]]()
    for each in (loader, evaluation):
        assert _resized_by_accelerate(ACCELERATOR, each, seen, is_compiled=False) is each
    assert asked == {}
    assert isinstance(_resized_by_accelerate(ACCELERATOR, evaluation, [], is_compiled=False), SizedLoader), (
        "it is the first one"
    )
