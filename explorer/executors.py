"""Who runs trials: one at a time, or several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from explorer.measurements import Measurement
from explorer.trials import Measure, TrialPlan


class TrialExecutor(ABC):
    """Runs up to `capacity` trials at once, each on hardware like all the others'. It is a `Measure` too.

    Whoever submits is the only one that waits. What a candidate does is an `Outcome`, as with every `Measure`.
    """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many trials may be in flight, at least 1. It may change while a job runs."""

    @abstractmethod
    def submit(self, plan: TrialPlan) -> None:
        """Begin a trial; no other in flight has its number."""

    @abstractmethod
    def wait(self) -> tuple[TrialPlan, Measurement]:
        """The next trial of those in flight that has ended, of which there is at least one."""

    def __call__(self, plan: TrialPlan) -> Measurement:
        """Run a trial while nothing else is in flight."""
        self.submit(plan)
        done, measurement = self.wait()
        assert done.number == plan.number, "another trial was in flight"
        return measurement


class OneAtATime(TrialExecutor):
    """Runs a trial when it is waited for."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._plan: TrialPlan | None = None

    @property
    def capacity(self) -> int:
        """One."""
        return 1

    def submit(self, plan: TrialPlan) -> None:
        """Keep the plan."""
        assert self._plan is None, "a trial is in flight"
        self._plan = plan

    def wait(self) -> tuple[TrialPlan, Measurement]:
        """Run it."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no trial is in flight"
        return plan, self._measure(plan)


def executor_of(measure: Measure) -> TrialExecutor:
    """`measure` itself if it is an executor, else one that runs a trial at a time with it."""
    return measure if isinstance(measure, TrialExecutor) else OneAtATime(measure)
