"""The search loop: first the needs of a space, then its likely best candidates, comparisons, and whole models.

Its context has what runs the trials, and its log turns them into steps for whoever stores them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bexp.explorer.cost.components import Component
from bexp.explorer.model.model import Variant
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventDraft, Progress, recommendation_event, render_message
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Outcome, judge
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial, TrialExecutor, TrialKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.search_space import NextCheck, SearchSpace, StepFigures
from bexp.explorer.search.suggestion import Suggestion


class ProgressLog:
    """Makes the steps of one search. A recommendation event is emitted only when its message changes.

    `is_main` says that its recommendation and its space are the job's.
    """

    def __init__(self, *, is_main: bool = True) -> None:
        self._is_main = is_main
        self._unsent: list[EventDraft] = []
        self._space: dict[str, Any] | None = None
        self._last_message = ""

    @property
    def is_pending(self) -> bool:
        """Whether there is an event for the next step."""
        return bool(self._unsent)

    def add(self, *events: EventDraft) -> None:
        """Emit events with the next step."""
        self._unsent += events

    def describe_space(self, summary: dict[str, Any]) -> None:
        """Say with the next step what the space is: the values of each dimension."""
        self._space = summary if self._is_main else None

    def resume(self, recommendation: Recommendation | None) -> None:
        """Take `recommendation` as emitted, because an earlier lease has stored it."""
        if recommendation is not None and not self._last_message:
            self._last_message = render_message(recommendation_event(recommendation))

    def step(
        self,
        trial: Trial | None = None,
        events: list[EventDraft] | None = None,
        recommendation: Recommendation | None = None,
    ) -> Progress:
        """The next step, with everything that was not emitted yet."""
        drafts, space = [*self._unsent, *(events or [])], self._space
        self._unsent, self._space = [], None
        if recommendation is not None:
            event = recommendation_event(recommendation)
            if render_message(event) != self._last_message:
                self._last_message = render_message(event)
                drafts.append(event)
        return Progress(tuple(drafts), trial, recommendation, self._is_main, space)


@dataclass(frozen=True, slots=True)
class VariantContext:
    """One variant of a job. `index` counts the job's variants; 0 is the main one, whose model is the request's own."""

    index: int
    model: ExploredModel
    request: ExplorationRequest
    report: DeviceReport
    executor: TrialExecutor
    history: TrialHistory
    clock: Callable[[], float]

    @property
    def is_main(self) -> bool:
        """Whether it is the variant whose recommendation is the job's."""
        return self.index == 0

    @property
    def variant(self) -> Variant:
        """The identity of the variant within its job."""
        return self.model.variant

    @property
    def trials(self) -> list[Trial]:
        """The trials of this variant so far, in order."""
        return self.history.trials_of(self.variant)


MOST_COMPARISONS = 6
"""The most trials in a row for the answer's comparisons. Each measures what another needs, or finds that it cannot."""


class SearchLoop:
    """Searches one space within the budget. Nothing that is stored is measured or reported again."""

    def __init__(self, context: VariantContext, space: SearchSpace, log: ProgressLog) -> None:
        self._context = context
        self._history = context.history
        self._clock = context.clock
        self._space = space
        self._log = log
        self._scheduler = TrialScheduler(context, space)

    def run(self) -> Generator[Progress, None, Recommendation | None]:
        """Explore until the confidence target or the budget is reached, then compare and check; returns the answer.

        There is none, and nothing more is suggested, as soon as the space is refuted.

        Each `Progress` is stored before the next is asked for.
        """
        yield from self._prepare()
        if not self._space.is_refuted:
            yield from self._finish_contaminated()
        while not self._space.is_refuted:
            before = self._history.next_number
            yield from self._search()
            yield from self._compare()
            if self._history.next_number > before:
                continue
            check = self._space.next_whole_model()
            if check is None:
                break
            yield from self._run_whole_model(check)
        if self._space.is_refuted:
            return None
        recommendation = self._space.recommend(final=True)
        if self._log.is_pending:
            yield self._log.step(recommendation=recommendation)
        return recommendation

    def _prepare(self) -> Iterator[Progress]:
        """Measure what the space needs before it can suggest anything, with nothing else in flight."""
        needed, started = self._space.prepare(), self._clock()
        while not self._space.is_refuted and (suggestion := next(needed, None)) is not None:
            self._scheduler.queue(suggestion, self._clock() - started)
            yield from self._complete_all()
            started = self._clock()
        self._log.resume(self._space.recommend())

    def _finish_contaminated(self) -> Iterator[Progress]:
        """Repeat a contaminated trial that was the last before a resume."""
        past = self._context.trials
        if past and past[-1].kind is TrialKind.COMPONENTS:
            self._scheduler.repeat_contaminated(self._space.row_of(past[-1]), past[-1])
            yield from self._complete_all()

    def _search(self) -> Iterator[Progress]:
        """Keep as many trials in flight as allowed, while they are worth it."""
        while True:
            while self._scheduler.has_room and self._begin_next():
                pass
            if not self._scheduler.num_in_flight:
                return
            yield from self._emit(self._scheduler.complete_next())

    def _begin_next(self) -> bool:
        """Begin a trial that is due, else the one that the space suggests; return whether there was one."""
        if self._scheduler.begin_due():
            return True
        if self._is_over():
            return False
        started = self._clock()
        suggestion = self._space.suggest()
        if suggestion is None:
            return False
        self._scheduler.queue(suggestion, self._clock() - started)
        return self._scheduler.begin_due()

    def _is_over(self) -> bool:
        """Return whether the search is over, whatever would be suggested.

        The search may overdraw its budget until there is one candidate to recommend.
        """
        history, index = self._history, self._context.index
        ended = self._space.is_refuted or self._space.ends_search
        if ended or history.is_hopeless(self._context.variant) or history.overdrawn(index):
            return True
        return history.exhausted(index) and self._space.is_answered

    def _compare(self) -> Iterator[Progress]:
        """Measure what the answer still needs."""
        for _ in range(MOST_COMPARISONS):
            suggestion = None if self._space.is_refuted else self._space.compare()
            hopeless = self._history.is_hopeless(self._context.variant)
            if suggestion is None or hopeless or self._history.overdrawn(self._context.index):
                return
            self._scheduler.queue(suggestion)
            yield from self._complete_all()

    def _complete_all(self) -> Iterator[Progress]:
        """Run what is due, and wait until nothing is in flight."""
        for completed in self._scheduler.complete_all():
            yield from self._emit(completed)

    def _emit(self, completed: CompletedTrial) -> Iterator[Progress]:
        """Yield a trial that has ended. Once it is stored, tell it to the space."""
        suggestion, trial = completed
        events = self._space.trial_events(suggestion, trial)
        yield self._log.step(trial, events, self._space.recommend())
        self._space.tell(trial)

    def _run_whole_model(self, check: NextCheck) -> Iterator[Progress]:
        """Run a whole model with nothing else in flight, and learn from it."""
        task, expected = self._space.begin_whole_model(self._history.next_number, check)
        started = self._clock()
        measurement = judge(self._context.executor(task))
        trial = Trial(
            number=task.number,
            kind=task.kind,
            measurement=measurement,
            predicted_peak_bytes=expected.peak_bytes,
            predicted_tokens_per_second=expected.tokens_per_second,
            seconds=self._clock() - started,
            shared_run=task.shared_run,
        )
        trial, events = self._space.learn_whole_model(check, trial)
        self._history.add(trial)
        yield self._log.step(trial, events, self._space.recommend())


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
        """The number of trials that have begun and not ended."""
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
        """Begin the next queued trial; return whether there was one."""
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
            rate_unit=reached.rate_unit,
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
