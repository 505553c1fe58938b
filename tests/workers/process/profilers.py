"""What tests do with real profiler processes on the CPU."""

from __future__ import annotations

import os

import pytest

from bexp.explorer.records.measurement import Measurement, Outcome, WholeModelMeasurement
from bexp.explorer.records.trial import TrialTask
from bexp.workers.process.child import ProfilerProcess
from bexp.workers.process.profiler import Profiler
from tests.workers.profiler.samples import MODEL, candidate, components_of, plan

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Threads that wait for each other on a busy host take longer than one alone."""

HUGE = MODEL.model_copy(update={"hidden_size": 1024, "seq_length": 1024, "vocab_size": 4096})
"""At a large micro-batch: seconds to run, and gigabytes of activations."""


def works(profiler: Profiler) -> bool:
    """Whether a small trial succeeds."""
    chosen = candidate(1)
    return profiler.measure(plan(chosen, components_of(chosen)[:1])).outcome is Outcome.OK


def measured_whole(profiler: Profiler, of: TrialTask) -> WholeModelMeasurement:
    """A whole model whose optimizer takes time. It is a difference, which the noise of a busy host may hide."""
    for _ in range(5):
        result = profiler.measure(of)
        assert result.outcome is Outcome.OK, result.reason
        assert result.whole_model is not None
        if result.whole_model.optimizer_seconds > 0:
            return result.whole_model
    raise AssertionError("the optimizer takes no time")


def slow_trial(profiler: Profiler, *, timeout_seconds: float = 600.0) -> Measurement:
    chosen = candidate(4)
    components = components_of(chosen, HUGE)
    return profiler.measure(plan(chosen, components, model=HUGE, timeout_seconds=timeout_seconds))


def kill_while_starting(profiler: Profiler, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the next `times` processes of a profiler before they say that they are ready."""
    spawn, left = profiler._process._spawn, [None] * times

    def spawn_and_kill() -> ProfilerProcess:
        process = spawn()
        if left:
            left.pop()
            process.kill()
        return process

    monkeypatch.setattr(profiler._process, "_spawn", spawn_and_kill)
