"""How many steps of a whole model are timed, by what its steps before took."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bexp.explorer.search.suggestion import LONG_STEP_SECONDS
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.trials import whole_model
from bexp.workers.profiler.trials.whole_model import MAX_STEPS, MIN_STEPS, TIMED_SECONDS, run_steps


class Moment:
    """A moment of a clock that only the training moves."""

    def __init__(self, at: float) -> None:
        self.at = at

    def seconds_until(self, later: Moment) -> float:
        return later.at - self.at


class Training:
    """A training on a GPU that there need not be: its begin is as long as it says, and so is each step."""

    graph_bytes = 0

    def __init__(self, begin_seconds: float, step_seconds: float) -> None:
        self.begin_seconds, self.step_seconds = begin_seconds, step_seconds
        self.at = 0.0
        self.num_steps = 0

    def begin(self) -> float:
        return self.begin_seconds

    def step(self) -> list[Any]:
        self.num_steps += 1
        moments = [Moment(self.at + share * self.step_seconds) for share in (0.0, 0.5, 1.0, 1.0)]
        self.at += self.step_seconds
        return moments

    def finish(self) -> None:
        """Nothing outlives it."""


def timed(training: Training, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of steps that count."""
    meter = SimpleNamespace(reset_peak=lambda: None, peak=lambda: 0)
    monkeypatch.setattr(whole_model, "byte_meter", lambda *_: nullcontext(meter))
    monkeypatch.setattr(whole_model, "_step_seconds", lambda _, made: made.step() and made.step_seconds)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 0)
    watch = nullcontext(SimpleNamespace(poll=lambda: None))
    instruments: Any = SimpleNamespace(
        device=torch.device("cuda"),
        rank_group=SimpleNamespace(all_reduce_max=lambda *values: values),
        monitor=SimpleNamespace(watch=lambda: watch),
        synchronize=lambda: None,
        own_bytes=0,
    )
    return len(run_steps(instruments, lambda: training, PhaseClock()).marks)


LONG = LONG_STEP_SECONDS["cuda"]


@pytest.mark.parametrize(
    ("begin", "step", "number"),
    [
        (0.1, 0.001, MAX_STEPS),
        (1.0, TIMED_SECONDS["cuda"] / 3, 3),
        (2.0, 0.9 * LONG, MIN_STEPS),
        (2 * LONG, 2 * LONG, 1),
    ],
)
def test_long_steps_are_timed_less_often(
    begin: float, step: float, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert timed(Training(begin, step), monkeypatch) == number


@pytest.mark.parametrize("step", [0.001, 0.5, 0.9 * LONG])
def test_a_first_micro_step_that_compiles_does_not_make_steps_long(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, compiled = Training(step, step), Training(10 * LONG, step)
    number = timed(usual, monkeypatch)
    assert timed(compiled, monkeypatch) == number
    assert compiled.num_steps == number + 1, "the one that seemed long is a warm-up"
