from __future__ import annotations

import multiprocessing
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import bexp


class Clock:
    """Stands for the module `time`; sleeping is all that takes time."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("bexp.step_exploration.time", found)
    return found


class Example:
    """A linear model whose step sleeps: 8 ms a micro-batch and 2 ms a sequence."""

    def __init__(self, clock: Any = time) -> None:
        self.clock = clock
        self.model = nn.Linear(4, 4)
        self.sizes: list[int] = []

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 4)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        self.clock.sleep(0.008 + 0.002 * len(x))
        loss = self.model(x).square().sum()
        loss.backward()
        found: torch.Tensor = loss.detach()
        return found


def explore(example: Example, **changed: Any) -> Any:
    arguments: dict[str, Any] = {"step": example.step, "batch": example.batch, "parameters": example.model}
    return bexp.explore(**{**arguments, "sizes": (1, 2, 4, 8), "repeats": 3, **changed})


def test_the_size_with_most_sequences_a_second_is_recommended(clock: Clock) -> None:
    found = explore(Example(clock), effective_batch_size=16)
    assert found.micro_batch_size == 8
    assert found.grad_accum_steps == 2
    assert found.confidence >= 80
    assert [result.outcome for result in found.results] == ["ok"] * 4


def test_gradients_weights_and_random_numbers_are_left_alone() -> None:
    example = Example()
    example.step(example.batch(2))
    gradient, weight = example.model.weight.grad, example.model.weight.detach().clone()
    states = (torch.get_rng_state(), random.getstate())
    found = explore(example, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1))
    assert found.optimizer_seconds > 0
    assert example.model.weight.grad is gradient
    assert torch.equal(example.model.weight, weight)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_size_that_runs_out_of_memory_ends_the_search(clock: Clock) -> None:
    example = Example(clock)
    plain = example.step

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = plain(x)
        if len(x) >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    found = explore(example, step=step)
    assert [result.outcome for result in found.results] == ["ok", "ok", "out_of_memory"]
    assert found.micro_batch_size == 2
    assert example.model.weight.grad is None


@pytest.mark.parametrize("failure", ["crashed", "not_finite", "timed_out"])
def test_any_other_failure_is_an_outcome_and_the_next_size_is_clean(failure: str) -> None:
    example = Example()
    plain = example.step

    def step(x: torch.Tensor) -> torch.Tensor:
        assert example.model.weight.grad is None or len(x) != 8 or x.shape == (8, 4)
        loss = plain(x)
        if len(x) != 4:
            return loss
        if failure == "crashed":
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        while failure == "timed_out":
            time.sleep(0.01)
        return loss * torch.nan

    found = explore(example, step=step, deadline_seconds=2.0)
    assert [result.outcome for result in found.results] == ["ok", "ok", failure, "ok"]
    assert found.micro_batch_size == 8


def test_nothing_fits() -> None:
    def step(_: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    found = explore(Example(), step=step)
    assert found.micro_batch_size is None
    assert found.notes == ("no size fits",)


def test_close_sizes_leave_doubt(clock: Clock) -> None:
    example, draws = Example(clock), random.Random(0)

    def step(x: torch.Tensor) -> None:
        clock.sleep(0.004 * len(x) * draws.uniform(0.7, 1.3))

    assert explore(example, step=step, repeats=4).confidence < 99


def test_sizes_that_do_not_divide_the_batch_are_left_out() -> None:
    example = Example()
    explore(example, effective_batch_size=6, sizes=(1, 3, 4))
    assert set(example.sizes) == {1, 3}
    with pytest.raises(ValueError, match="divides"):
        explore(example, effective_batch_size=6, sizes=(4, 5))


def test_the_answer_is_read_by_training_arguments() -> None:
    found = explore(Example(), effective_batch_size=16)
    assert bexp.training_arguments(found.to_json())["per_device_train_batch_size"] == 8


def _rank(rank: int, port: int, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    example = Example()
    model = nn.parallel.DistributedDataParallel(example.model)

    def step(x: torch.Tensor) -> None:
        if rank == 1 and len(x) >= 4:
            raise torch.OutOfMemoryError("only here")
        model(x).square().sum().backward()

    found = explore(example, step=step, parameters=model, no_sync=model.no_sync)
    answers[rank] = (found.micro_batch_size, tuple(result.outcome for result in found.results))
    dist.destroy_process_group()


def test_what_one_process_meets_counts_for_all() -> None:
    with multiprocessing.Manager() as manager:
        answers = manager.dict()
        spawn(_rank, args=(free_port(), answers), nprocs=2)
        assert dict(answers)[0] == dict(answers)[1]
        assert dict(answers)[0][1] == ("ok", "ok", "out_of_memory")


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
