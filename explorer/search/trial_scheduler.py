"""The trials of a variant: ordered, begun, in flight, and learnt from as they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optuna.trial import Trial as OptunaTrial

from explorer.cost_model.components import Component
from explorer.cost_model.step import GIB
from explorer.records.measurement import Measurement, Outcome, judge
from explorer.records.trial import Measure, Trial, TrialKind, TrialPlan, count_processes
from explorer.search.acquisition import Suggestion, split
from explorer.search.history import TrialHistory
from explorer.search.setup import VariantSetup
from explorer.spec.candidate import Candidate
from explorer.spec.hardware import DeviceReport
from explorer.spec.request import ExplorationRequest

WHOLE_MODEL_TIMEOUT_FACTOR = 3  # a whole model builds all its layers


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """A trial to begin: of a suggestion, or of a part of it; `asked` is the study's trial that it answers."""

    candidate: Candidate
    suggestion: Suggestion
    asked: OptunaTrial | None = None
    suggest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CompletedTrial:
    """A trial that has ended and been learnt from, and what it was ordered for."""

    trial: Trial
    order: TrialRequest


@dataclass(frozen=True, slots=True)
class _RunningTrial:
    """An order in flight, and what was believed of its candidate when it began."""

    order: TrialRequest
    predicted_peak_bytes: int
    predicted_tokens_per_second: float
    started: float


class TrialScheduler:
    """As many trials at once as the executor takes; what ends is kept in the history, and the state learns it."""

    def __init__(
        self,
        index: int,
        request: ExplorationRequest,
        report: DeviceReport,
        measure: Measure,
        history: TrialHistory,
        setup: VariantSetup,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._request = request
        self._report = report
        self._executor = executor_of(measure)
        self._history = history
        self._table, self._state = setup.table, setup.state
        self._clock = clock
        self._in_flight: dict[int, _RunningTrial] = {}
        self._due: deque[TrialRequest] = deque()

    def __len__(self) -> int:
        """In flight."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another trial may begin now."""
        return len(self._in_flight) < self._executor.capacity

    def order(
        self,
        candidate: Candidate,
        suggestion: Suggestion,
        asked: OptunaTrial | None = None,
        suggest_seconds: float = 0.0,
    ) -> None:
        """Share the components out among the trials that may be in flight, so that each has about as much to do."""
        most = max(1, min(self._executor.capacity, self._history.trials_left(self._index)))
        for part in split(suggestion, most, self._table, self._state.surrogate):
            self._due.append(TrialRequest(candidate, part, asked, suggest_seconds))
            asked, suggest_seconds = None, 0.0

    def begin_due(self) -> bool:
        """Begin the next order that is due; returns whether there was one."""
        if not self._due:
            return False
        order = self._due.popleft()
        row, suggestion = order.suggestion.row, order.suggestion
        started = self._clock()
        plan = self._plan(order.candidate, TrialKind.COMPONENTS, suggestion.components)
        self._in_flight[plan.number] = _RunningTrial(
            order=order,
            predicted_peak_bytes=self._state.bytes(row).peak,
            predicted_tokens_per_second=self._state.seconds(row).tokens_per_second,
            started=started,
        )
        self._history.begin(plan.number)
        self._state.expect(plan.number, suggestion)
        self._executor.submit(plan.model_copy(update={"again": suggestion.again}))
        return True

    def land_all(self) -> Iterator[CompletedTrial]:
        """Begin what is due and wait until nothing is in flight, repeats of what was contaminated included."""
        while self._in_flight or self._due:
            while self.has_room and self.begin_due():
                pass
            yield self.land()

    def land(self) -> CompletedTrial:
        """Wait for the next trial of those in flight, and learn from it."""
        plan, measurement = self._executor.wait()
        measured = self._clock()
        measurement = judge(measurement)
        flight = self._in_flight.pop(plan.number)
        order, row = flight.order, flight.order.suggestion.row
        self._state.learn_trials([(plan.number, measurement)])
        # By all candidates of a sharding: it says nothing of this one.
        shared = any(c in self._table.communications for c in plan.components)
        if not shared:
            measurement = self._judge(row, plan.number, measurement)
        composes = measurement.outcome is Outcome.OK and not shared
        trial = Trial(
            number=plan.number,
            kind=TrialKind.COMPONENTS,
            measurement=measurement,
            predicted_peak_bytes=flight.predicted_peak_bytes,
            measured_peak_bytes=self._state.bytes(row).peak if self._state.is_known(row) else None,
            predicted_tokens_per_second=flight.predicted_tokens_per_second,
            tokens_per_second=self._state.seconds(row).tokens_per_second if composes else None,
            suggest_seconds=order.suggest_seconds + self._clock() - measured,
            seconds=measured - flight.started,
        )
        self._history.add(trial)
        self.repeat_contaminated(trial)
        return CompletedTrial(trial, order)

    def repeat_contaminated(self, trial: Trial) -> None:
        """TrialRequest again what was timed on a shared or throttled device; each run may be followed by another."""
        suggestion = self._state.to_repeat(trial.measurement)
        if suggestion is not None:
            self._due.append(TrialRequest(trial.candidate, suggestion))

    def run_whole(self, candidate: Candidate) -> tuple[Measurement, float]:
        """Run a candidate whole, with nothing else in flight; returns its seconds too. Nothing learns it yet."""
        started = self._clock()
        measurement = judge(self._executor(self._plan(candidate, TrialKind.WHOLE_MODEL, ())))
        return measurement, self._clock() - started

    def _plan(self, candidate: Candidate, kind: TrialKind, components: tuple[Component, ...]) -> TrialPlan:
        timeout = self._request.budget.trial_timeout_seconds
        return TrialPlan(
            number=self._history.next_number,
            kind=kind,
            model=self._table.model,
            candidate=candidate,
            components=components,
            num_processes=count_processes(kind, candidate, components, self._request, self._report.hardware),
            timeout_seconds=timeout * (WHOLE_MODEL_TIMEOUT_FACTOR if kind is TrialKind.WHOLE_MODEL else 1),
        )

    def _judge(self, row: int, number: int, measurement: Measurement) -> Measurement:
        """A candidate whose measured parts add up to more than the limit is out of memory, though each part ran."""
        if measurement.outcome is not Outcome.OK or self._state.fits(row) or self._is_awaited(row):
            return measurement
        found, limit = self._state.bytes(row), self._state.limit_bytes
        reason = (
            f"a step needs {found.required / GIB:.2f} GiB, {found.peak / GIB:.2f} of it allocated; "
            f"the limit is {limit / GIB:.2f} GiB"
        )
        judged = measurement.model_copy(update={"outcome": Outcome.OUT_OF_MEMORY, "reason": reason})
        self._state.learn_trials([(number, judged)])
        return judged

    def _is_awaited(self, row: int) -> bool:
        """Whether anything of a candidate is in flight or due."""
        orders = (*(flight.order for flight in self._in_flight.values()), *self._due)
        components = self._table.decompositions[row].components
        return any(component in components for order in orders for component in order.suggestion.components)


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
