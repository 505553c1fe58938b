"""One trial at a time, through the interface of several at once."""

from __future__ import annotations

import pytest

from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import OneAtATime, TrialExecutor, TrialKind, TrialTask, executor_of
from tests.explorer.search.small import candidate, small_request


def plan(number: int) -> TrialTask:
    model = small_request().model
    assert model is not None
    return TrialTask(number=number, kind=TrialKind.WHOLE_MODEL, model=model, candidate=candidate(), timeout_seconds=1)


class Counts:
    """Remembers which plans were run."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def __call__(self, given: TrialTask) -> Measurement:
        self.ran.append(given.number)
        return Measurement(candidate=given.candidate, outcome=Outcome.CRASHED, reason=f"plan {given.number}")


def test_a_trial_is_run_when_it_is_waited_for() -> None:
    counts = Counts()
    executor = OneAtATime(counts)
    assert executor.capacity == 1
    executor.submit(plan(3))
    assert counts.ran == []
    done, measurement = executor.wait()
    assert (done.number, measurement.reason, counts.ran) == (3, "plan 3", [3])


def test_an_executor_is_a_measure_too() -> None:
    executor = OneAtATime(Counts())
    assert executor(plan(5)).reason == "plan 5"


def test_a_measure_that_returns_another_trial_is_a_mistake() -> None:
    class Confused(OneAtATime):
        def wait(self) -> tuple[TrialTask, Measurement]:
            _, measurement = super().wait()
            return plan(9), measurement

    with pytest.raises(AssertionError, match="another trial was in flight"):
        Confused(Counts())(plan(1))


def test_a_plain_measure_is_wrapped_and_an_executor_is_taken_as_it_is() -> None:
    executor: TrialExecutor = OneAtATime(Counts())
    assert executor_of(executor) is executor
    counts = Counts()
    wrapped = executor_of(counts)
    assert isinstance(wrapped, OneAtATime)
    wrapped(plan(4))
    assert counts.ran == [4]
