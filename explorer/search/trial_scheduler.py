"""Schedules the trials of a space: it queues and starts them, and the space learns from each when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bexp.explorer.cost.components import Component
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Outcome, judge
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.search_space import SearchSpace, StepFigures
from bexp.explorer.search.suggestion import Suggestion
from bexp.explorer.search.variant_context import VariantContext


class CompletedTrial(NamedTuple):
    """A trial that has ended and been learnt from, and what was suggested."""

    suggestion: Suggestion
    trial: Trial


@dataclass(frozen=True, slots=True)
class _RunningTrial:
    """A trial in flight, and what was expected of its candidate when it began."""

    suggestion: Suggestion
    suggest_seconds: float
    expected: StepFigures
    started: float


class TrialScheduler:
    """Keeps as many trials in flight as the executor takes; the history keeps those that end, the space learns them."""

    def __init__(self, context: VariantContext, space: SearchSpace) -> None:
        self._executor = context.executor
        self._history = context.history
        self._clock = context.clock
        self._variant = context.index
        self._space = space
        self._in_flight: dict[int, _RunningTrial] = {}
        self._due: deque[tuple[Suggestion, float]] = deque()

    @property
    def num_in_flight(self) -> int:
        """How many trials have begun and not ended."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another trial may begin now."""
        return len(self._in_flight) < self._executor.capacity

    def queue(self, suggestion: Suggestion, suggest_seconds: float = 0.0) -> None:
        """Queue a suggestion, which took so many seconds, divided among the trials that may be in flight."""
        most = max(1, min(self._executor.capacity, self._history.trials_left(self._variant)))
        first, *others = self._space.split(suggestion, most)
        self._due.append((first, suggest_seconds))
        self._due.extend((part, 0.0) for part in others)

    def begin_due(self) -> bool:
        """Begin the next queued trial; returns whether there was one."""
        if not self._due:
            return False
        suggestion, suggest_seconds = self._due.popleft()
        started, number = self._clock(), self._history.next_number
        task, expected = self._space.begin(number, suggestion)
        self._in_flight[number] = _RunningTrial(suggestion, suggest_seconds, expected, started)
        self._history.begin(number)
        self._executor.submit(task)
        return True

    def complete_all(self) -> Iterator[CompletedTrial]:
        """Begin what is queued and wait until nothing is in flight, repeats of contaminated trials included."""
        while self._in_flight or self._due:
            while self.has_room and self.begin_due():
                pass
            yield self.complete_next()

    def complete_next(self) -> CompletedTrial:
        """Wait for the next trial in flight to end, and learn from it."""
        task, measurement = self._executor.wait()
        measured = self._clock()
        running = self._in_flight.pop(task.number)
        judged, reached = self._space.learn(task.number, running.suggestion, judge(measurement), self._awaited())
        trial = Trial(
            number=task.number,
            kind=task.kind,
            measurement=judged,
            predicted_peak_bytes=running.expected.peak_bytes,
            measured_peak_bytes=reached.peak_bytes,
            predicted_tokens_per_second=running.expected.tokens_per_second,
            tokens_per_second=reached.tokens_per_second,
            suggest_seconds=running.suggest_seconds + self._clock() - measured,
            seconds=measured - running.started,
        )
        self._history.add(trial)
        self.repeat_contaminated(running.suggestion.row, trial)
        return CompletedTrial(running.suggestion, trial)

    def repeat_contaminated(self, row: int | None, trial: Trial) -> None:
        """Queue components again that were timed on a shared or throttled device. This may happen several times."""
        if row is None or trial.measurement.outcome is not Outcome.CONTAMINATED:
            return
        space = self._space
        contaminated = (m.component for m in trial.measurement.components if m.contamination is not None)
        left = tuple(c for c in contaminated if space.times_contaminated(c) < CONTAMINATED_ATTEMPTS)
        if left:
            again = all(space.is_measured(component) for component in left)
            self._due.append((Suggestion(row, left, again=again, reason="the last run was contaminated"), 0.0))

    def _awaited(self) -> frozenset[Component]:
        """The components that are in flight or queued."""
        suggestions = (*(running.suggestion for running in self._in_flight.values()), *(s for s, _ in self._due))
        return frozenset(component for suggestion in suggestions for component in suggestion.components)
