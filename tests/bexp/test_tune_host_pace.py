"""How long a trial of a training command is timed, and what its error is, while the host sets the pace."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from bexp.explorer.search.host_pace import BUSY
from bexp.tune import clock as tune_clock
from bexp.tune.clock import (
    LEAST_SECONDS,
    MOST_SECONDS,
    MOST_STEPS,
    PRECISE_SECONDS,
    UNSETTLED_SECONDS,
    UNSTEADY_SECONDS,
    WARM_UP_SECONDS,
    Clock,
)
from bexp.tune.ranks import Ranks


class Gpu:
    """A device that was busy for a share of the time, and a driver that takes its time to say so."""

    def __init__(self, share: float | None, at: list[float]) -> None:
        self.share, self.at = share, at

    def mean_busy_share(self, since: float) -> float | None:
        self.at[0] += 0.01
        return self.share


def run(monkeypatch: pytest.MonkeyPatch, share: float | None, seconds: Iterable[float]) -> tuple[dict[str, Any], float]:
    """The figures of a training with these micro-steps, one in each optimizer step, and how long they were timed."""
    at = [0.0]
    monkeypatch.setattr(tune_clock, "_gpu_of", lambda device: Gpu(share, at))
    monkeypatch.setattr(Clock, "_now", lambda clock: at[0])
    clock = Clock(torch.device("cpu"), Ranks(), 1)
    clock.begin_micro_step()
    for each in seconds:
        at[0] += each
        clock.end_micro_step()
        clock.end_step()
        if clock.is_over:
            return clock.figures(), at[0]
    raise AssertionError("it ends")


@pytest.mark.parametrize("share", [0.0, BUSY - 0.01, BUSY, 1.0, None])
@pytest.mark.parametrize("step", [0.2, 0.5 * PRECISE_SECONDS / MOST_STEPS])
def test_a_training_that_waits_for_the_host_is_timed_for_longer(
    monkeypatch: pytest.MonkeyPatch, share: float | None, step: float
) -> None:
    figures, took = run(monkeypatch, share, itertools.repeat(step))
    waits = share is not None and share < BUSY
    assert took == pytest.approx(WARM_UP_SECONDS + (PRECISE_SECONDS if waits else LEAST_SECONDS), abs=0.5)
    assert figures["busy_share"] == share
    assert figures["micro_step_seconds"] == pytest.approx(step)
    assert (figures["span_seconds"] is not None) == waits, "there were enough spans"


def test_phases_of_seconds_count_as_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast, number = 0.06, 0.04, 22
    phases = itertools.cycle([slow] * number + [fast] * (number * 3 // 2))
    figures, _ = run(monkeypatch, 0.5, phases)
    low, high = figures["span_seconds"]
    assert 0.999 * fast <= low < high <= 1.001 * slow
    alone = statistics.stdev([slow, fast] * 60) / figures["repeats"] ** 0.5
    assert figures["standard_error_seconds"] > 2 * alone, "micro-steps in a row are alike"


def test_a_host_that_stands_still_for_seconds_does_not_change_the_typical_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, stall = 0.1, 5.0
    figures, took = run(monkeypatch, 0.2, [*[usual] * 20, stall, *[usual] * 300])
    assert figures["micro_step_seconds"] == pytest.approx(usual, rel=0.05)
    assert figures["standard_error_seconds"] > usual, "it is far from sure"
    assert took == pytest.approx(WARM_UP_SECONDS + UNSTEADY_SECONDS, abs=1.5)


@pytest.mark.parametrize(
    ("spread", "seconds"), [(0.0, PRECISE_SECONDS), (0.02, PRECISE_SECONDS), (0.4, UNSTEADY_SECONDS)]
)
def test_a_pace_that_varies_from_second_to_second_is_timed_for_longer(
    monkeypatch: pytest.MonkeyPatch, spread: float, seconds: float
) -> None:
    spans = itertools.cycle([0.1 * (1 + spread)] * 10 + [0.1 * (1 - spread)] * 10)
    _, took = run(monkeypatch, 0.5, spans)
    assert took == pytest.approx(WARM_UP_SECONDS + seconds, abs=1.0)


def test_a_training_that_gets_faster_for_long_is_judged_by_its_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernels of each width come from a disk that is read for the first time."""
    usual = 0.1
    figures, took = run(monkeypatch, 0.2, (usual + 1.5 * 0.95**number for number in itertools.count()))
    assert figures["micro_step_seconds"] == pytest.approx(usual, rel=0.3)
    assert took < UNSETTLED_SECONDS + MOST_SECONDS
