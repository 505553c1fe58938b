"""Schedules the trials of a variant: it queues and starts them, and the state learns from each when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from bexp.explorer.cost_model.components import Component
from bexp.explorer.cost_model.step import GIB
from bexp.explorer.records.measurement import Measurement, Outcome, judge
from bexp.explorer.records.trial import Trial, TrialKind, TrialPlan, count_processes, timeout_seconds
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.study import AskedTrial, TrialStudy
from bexp.explorer.search.suggestion import Suggestion, split_suggestion
from bexp.explorer.search.variant_context import VariantContext
from bexp.explorer.spec.candidate import Candidate


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """A trial to begin. `asked` is null until then for a trial that the search itself needs."""

    suggestion: Suggestion
    asked: AskedTrial | None = None
    suggest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CompletedTrial:
    """A trial that has ended and been learnt from, and the study's trial that it has to be told to."""

    trial: Trial
    asked: AskedTrial


@dataclass(frozen=True, slots=True)
class _RunningTrial:
    """A trial in flight, and what was expected of its candidate when it began."""

    asked: AskedTrial
    suggest_seconds: float
    predicted_peak_bytes: int
    predicted_tokens_per_second: float
    started: float


class TrialScheduler:
    """Keeps as many trials in flight as the executor takes; the history keeps those that end, the state learns them."""

    def __init__(self, context: VariantContext, posterior: Posterior, study: TrialStudy) -> None:
        self._context = context
        self._executor = context.executor
        self._history = context.history
        self._clock = context.clock
        self._posterior = posterior
        self._table = posterior.table
        self._study = study
        self._in_flight: dict[int, _RunningTrial] = {}
        self._due: deque[TrialRequest] = deque()

    @property
    def num_in_flight(self) -> int:
        """How many trials have begun and not ended."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another trial may begin now."""
        return len(self._in_flight) < self._executor.capacity

    def queue_asked(self, asked: AskedTrial, suggest_seconds: float) -> None:
        """Queue what the study suggested; `suggest_seconds` are what the suggestion took."""
        first, *others = self._split(asked.suggestion)
        self._due.append(TrialRequest(first, AskedTrial(first, asked.trial), suggest_seconds))
        self._due.extend(TrialRequest(part) for part in others)

    def queue(self, suggestion: Suggestion) -> None:
        """Queue a trial that the search itself needs."""
        self._due.extend(TrialRequest(part) for part in self._split(suggestion))

    def begin_due(self) -> bool:
        """Begin the next queued trial; returns whether there was one."""
        if not self._due:
            return False
        request = self._due.popleft()
        suggestion = request.suggestion
        started = self._clock()
        candidate = self._table.candidates[suggestion.row]
        plan = self._plan(candidate, TrialKind.COMPONENTS, suggestion.components)
        self._in_flight[plan.number] = _RunningTrial(
            asked=request.asked or self._study.ask_for(suggestion),
            suggest_seconds=request.suggest_seconds,
            predicted_peak_bytes=self._posterior.bytes(suggestion.row).peak,
            predicted_tokens_per_second=self._posterior.seconds(suggestion.row).tokens_per_second,
            started=started,
        )
        self._history.begin(plan.number)
        self._posterior.knowledge.expect(plan.number, suggestion)
        self._executor.submit(plan.model_copy(update={"again": suggestion.again}))
        return True

    def complete_all(self) -> Iterator[CompletedTrial]:
        """Begin what is queued and wait until nothing is in flight, repeats of contaminated trials included."""
        while self._in_flight or self._due:
            while self.has_room and self.begin_due():
                pass
            yield self.complete_next()

    def complete_next(self) -> CompletedTrial:
        """Wait for the next trial in flight to end, and learn from it."""
        plan, measurement = self._executor.wait()
        measured = self._clock()
        measurement = judge(measurement)
        running = self._in_flight.pop(plan.number)
        row = running.asked.suggestion.row
        self._posterior.knowledge.learn(plan.number, measurement)
        # Communication is measured for all candidates of a sharding; it says nothing of this one.
        shared = any(c in self._table.communications for c in plan.components)
        if not shared:
            measurement = self._judge_memory(row, measurement)
        composes = measurement.outcome is Outcome.OK and not shared
        trial = Trial(
            number=plan.number,
            kind=TrialKind.COMPONENTS,
            measurement=measurement,
            predicted_peak_bytes=running.predicted_peak_bytes,
            measured_peak_bytes=self._posterior.bytes(row).peak if self._posterior.is_known(row) else None,
            predicted_tokens_per_second=running.predicted_tokens_per_second,
            tokens_per_second=self._posterior.seconds(row).tokens_per_second if composes else None,
            suggest_seconds=running.suggest_seconds + self._clock() - measured,
            seconds=measured - running.started,
        )
        self._history.add(trial)
        self.repeat_contaminated(trial)
        return CompletedTrial(trial, running.asked)

    def repeat_contaminated(self, trial: Trial) -> None:
        """Queue components again that were timed on a shared or throttled device. This may happen several times."""
        suggestion = self._posterior.knowledge.to_repeat(trial.measurement)
        if suggestion is not None:
            self._due.append(TrialRequest(suggestion))

    def run_whole(self, candidate: Candidate) -> tuple[Measurement, float]:
        """Run a whole model with nothing else in flight; returns its seconds, too. Nothing learns it yet."""
        started = self._clock()
        measurement = judge(self._executor(self._plan(candidate, TrialKind.WHOLE_MODEL, ())))
        return measurement, self._clock() - started

    def _split(self, suggestion: Suggestion) -> tuple[Suggestion, ...]:
        """Divide the components among the trials that may be in flight, so that each takes about the same time."""
        most = max(1, min(self._executor.capacity, self._history.trials_left(self._context.index)))
        return split_suggestion(suggestion, most, self._table, self._posterior.surrogate)

    def _plan(self, candidate: Candidate, kind: TrialKind, components: tuple[Component, ...]) -> TrialPlan:
        request = self._context.request
        return TrialPlan(
            number=self._history.next_number,
            kind=kind,
            model=self._table.model,
            candidate=candidate,
            components=components,
            num_processes=count_processes(kind, candidate, components, request, self._context.report.hardware),
            timeout_seconds=timeout_seconds(kind, request),
        )

    def _judge_memory(self, row: int, measurement: Measurement) -> Measurement:
        """A candidate whose measured parts add up to more than the limit is out of memory, although each part ran.

        If they do so by no more than the error of a sum, only its whole model decides.
        """
        if measurement.outcome is not Outcome.OK or self._posterior.memory.may_fit_C[row] or self._is_awaited(row):
            return measurement
        found, limit = self._posterior.bytes(row), self._posterior.limit_bytes
        reason = (
            f"a step needs {found.required / GIB:.2f} GiB, {found.peak / GIB:.2f} of it allocated; "
            f"the limit is {limit / GIB:.2f} GiB"
        )
        self._posterior.knowledge.reject(measurement.candidate, reason)
        return measurement.model_copy(update={"outcome": Outcome.OUT_OF_MEMORY, "reason": reason})

    def _is_awaited(self, row: int) -> bool:
        """Whether any component of a candidate is in flight or queued."""
        suggestions = (
            *(running.asked.suggestion for running in self._in_flight.values()),
            *(r.suggestion for r in self._due),
        )
        components = self._table.decompositions[row].components
        return any(component in components for suggestion in suggestions for component in suggestion.components)
