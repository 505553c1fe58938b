"""The interface to run trials, one at a time or several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import Measure, TrialPlan


class TrialExecutor(ABC):
    """Runs up to `capacity` trials at once, all on equal hardware. It is a `Measure`, too.

    One caller submits and waits. A candidate that fails is an `Outcome`, as with every `Measure`, never an exception.
    """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many trials may be in flight, at least 1. It may change while a job runs."""

    @abstractmethod
    def submit(self, plan: TrialPlan) -> None:
        """Begin a trial; no other trial in flight has its number."""

    @abstractmethod
    def wait(self) -> tuple[TrialPlan, Measurement]:
        """Wait for the next trial in flight to end; there is at least one."""

    def __call__(self, plan: TrialPlan) -> Measurement:
        """Run a trial while nothing else is in flight."""
        self.submit(plan)
        done, measurement = self.wait()
        assert done.number == plan.number, "another trial was in flight"
        return measurement


class OneAtATime(TrialExecutor):
    """Runs one trial at a time, when it is waited for."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._plan: TrialPlan | None = None

    @property
    def capacity(self) -> int:
        """One trial."""
        return 1

    def submit(self, plan: TrialPlan) -> None:
        """Keep the plan until it is waited for."""
        assert self._plan is None, "a trial is in flight"
        self._plan = plan

    def wait(self) -> tuple[TrialPlan, Measurement]:
        """Run the plan that was submitted."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no trial is in flight"
        return plan, self._measure(plan)


def executor_of(measure: Measure) -> TrialExecutor:
    """`measure` itself if it is an executor, else one that runs a trial at a time with it."""
    return measure if isinstance(measure, TrialExecutor) else OneAtATime(measure)
