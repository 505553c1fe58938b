"""The interface to run trials, one at a time or several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import Measure, TrialTask


class TrialExecutor(ABC):
    """Runs up to `capacity` trials at once, all on equal hardware. It is a `Measure`, too.

    One caller submits and waits. A candidate that fails is an `Outcome`, as with every `Measure`, never an exception.
    """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The number of trials that may be in flight, at least 1. It may change while a job runs."""

    @abstractmethod
    def submit(self, task: TrialTask) -> None:
        """Begin a trial; no other trial in flight has its number."""

    @abstractmethod
    def wait(self) -> tuple[TrialTask, Measurement]:
        """Wait for the next trial in flight to end; there is at least one."""

    def __call__(self, task: TrialTask) -> Measurement:
        """Run a trial while nothing else is in flight."""
        self.submit(task)
        done, measurement = self.wait()
        assert done.number == task.number, "another trial was in flight"
        return measurement


class OneAtATime(TrialExecutor):
    """Runs one trial at a time, when it is waited for."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._task: TrialTask | None = None

    @property
    def capacity(self) -> int:
        """One trial."""
        return 1

    def submit(self, task: TrialTask) -> None:
        """Keep the task until it is waited for."""
        assert self._task is None, "a trial is in flight"
        self._task = task

    def wait(self) -> tuple[TrialTask, Measurement]:
        """Run the task that was submitted."""
        task, self._task = self._task, None
        assert task is not None, "no trial is in flight"
        return task, self._measure(task)


def executor_of(measure: Measure) -> TrialExecutor:
    """Return `measure` itself if it is an executor, else one that runs a trial at a time with it."""
    return measure if isinstance(measure, TrialExecutor) else OneAtATime(measure)
