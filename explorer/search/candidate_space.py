"""The candidates of one device: bases, suggestions of a study, comparisons, and whole models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from optuna.trial import Trial as OptunaTrial

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.peak_memory import PeakMemory
from bexp.explorer.cost.step import GIB, memory_limit
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.event import EventDraft
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation, Relaxation
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask, count_processes, timeout_seconds
from bexp.explorer.search.alternatives import compare_whole_run, find_alternatives, whole_model_tokens_per_second
from bexp.explorer.search.candidate_report import build_recommendation
from bexp.explorer.search.earlier_check import ignored_event
from bexp.explorer.search.event_messages import (
    answer_changed_event,
    base_event,
    eager_event,
    no_base_event,
    noise_event,
    trial_event,
    whole_model_event,
)
from bexp.explorer.search.importance import importance_of_dimensions
from bexp.explorer.search.legal_space import PrunedSpace
from bexp.explorer.search.loop import ProgressLog, VariantContext
from bexp.explorer.search.noise_limit import noise_figures
from bexp.explorer.search.relaxations import explain_without_fit, find_smallest
from bexp.explorer.search.reported_runs import reported_event
from bexp.explorer.search.restored import LAST_RUNS, RUNS, BaseCandidate, restore_knowledge
from bexp.explorer.search.samplers import SearchStages, make_sampler
from bexp.explorer.search.search_space import NextCheck, SearchSpace, StepFigures
from bexp.explorer.search.study import AskedTrial, Points, TrialStudy, params_of
from bexp.explorer.search.suggestion import Suggestion, split_suggestion
from bexp.explorer.search.whole_models import next_comparison


class CandidateSpace(SearchSpace):
    """The candidates of one variant, of which at least one may fit. Rows are those of the table."""

    def __init__(self, context: VariantContext, space: PrunedSpace, log: ProgressLog) -> None:
        assert space.table is not None, "at least one candidate may fit"
        self._context = context
        self._request = context.request
        self._history = context.history
        self._log = log
        self._table = space.table
        self._trusted = space.trusted
        self._trusted_rows = sorted(space.table.row[each] for each in space.trusted if each in space.table.row)
        self._plainest = space.bases[0]
        self._bases = tuple(c for c in space.bases if c in space.table.row)
        report = context.report
        restored = restore_knowledge(space, context.request, report, context.history, context.index)
        self._posterior, self._noise, self._whole_models = restored.posterior, restored.noise, restored.whole_models
        self._base = restored.base
        if self._posterior.knowledge.reported and not context.trials:
            log.add(reported_event(self._posterior.knowledge.reported))
        if report.earlier.num_ignored and context.is_main and not context.trials:
            log.add(ignored_event(report.earlier))
        past = [t for t in context.trials if t.kind is TrialKind.COMPONENTS]
        points = Points([params_of(candidate) for candidate in self._table.candidates])
        self._stages = SearchStages(self._posterior, self._plainest, context.trials)
        sampler = make_sampler(context.request.sampler, self._stages, points)
        self._study = TrialStudy(sampler, [(params_of(t.candidate), t) for t in past])
        self._asked: OptunaTrial | None = None
        """The study's trial that the next trial to begin belongs to; None if the search needs that trial itself."""
        self._running: dict[int, AskedTrial] = {}
        self._reuse = self._posterior.knowledge.reuse
        self._is_reuse_reported = self._reuse is None or self._reuse.is_decided
        self._base_runs = BaseCandidate(self._posterior, self._bases)

    def prepare(self) -> Iterator[Suggestion]:
        """Yield a check of earlier measurements, communication, then bases in order of preference until one fits."""
        if self._reuse is not None and not self._reuse.is_decided:
            check = self._reuse.check
            yield Suggestion(check.row, check.components, reason="a check of earlier measurements")
        yield from self._communication()
        for candidate in self._bases if self._base is None else ():
            row = self._table.row[candidate]
            if not self._posterior.is_known(row) and self._posterior.is_open(row):
                yield Suggestion(row, self._posterior.missing(row), reason="a base")
            if self._posterior.is_known(row) and self._posterior.is_open(row) and self._posterior.fits(row):
                self._base = candidate
                break
        checked = None if self._reuse is None else self._table.candidates[self._reuse.check.row]
        if self._base is None and all(t.candidate in {*self._bases, checked} for t in self._context.trials):
            self._log.add(no_base_event())

    def _communication(self) -> Iterator[Suggestion]:
        """Communication on all devices, once for each sharding, because no other component predicts it."""
        for communication in self._table.communications:
            if communication in self._posterior.knowledge.log.runs:
                continue
            candidates = (*self._bases, *self._table.candidates)
            candidate = next(c for c in candidates if c.sharding is communication.sharding)
            row = self._table.row[candidate]
            if self._posterior.is_open(row):
                yield Suggestion(row, (communication,), reason="communication between devices")

    def suggest(self) -> Suggestion | None:
        """Return the study's suggestion; None once the confidence target is reached, or cannot be because of noise.

        On a noisy device the base is measured again first, because every relative performance rests on it.
        """
        if self._base is not None and (again := self._base_runs.again(self._base, RUNS)) is not None:
            return again
        while True:
            stage = self._stages.posterior
            confidence = stage.search_confidence
            is_sure = confidence is not None and 100 * confidence >= self._stages.confidence_target
            is_spent = self._stages.is_spent(self._history, noisy=self._noise.is_reached)
            is_over = is_sure or is_spent or self._noise.ends_search
            asked = None if is_over else self._study.ask()
            if asked is not None:
                self._asked = asked.trial
                return asked.suggestion
            if self._stages.is_last:
                return None
            self._stages.is_last = True
            if (eager := eager_event(stage)) is not None:
                self._log.add(eager)

    def compare(self) -> Suggestion | None:
        """Return the next comparison; after whole models have changed the answer, only the answer itself is completed.

        On a noisy device the base is measured once more, a while after its first runs.
        """
        done = self._whole_models.has_run or self._whole_models.is_impossible
        spent = 0.0 if done else self._history.device_seconds
        following = next_comparison(self._posterior, self._context.report, spent)
        if following is not None or done or self._base is None:
            return following
        return self._base_runs.again(self._base, LAST_RUNS)

    def split(self, suggestion: Suggestion, most: int) -> Sequence[Suggestion]:
        """Return parts of a suggestion that take about the same time."""
        return split_suggestion(suggestion, most, self._table, self._posterior.surrogate)

    @property
    def is_answered(self) -> bool:
        """Whether a candidate is known well enough to be recommended."""
        return self._posterior.search_confidence is not None

    @property
    def is_refuted(self) -> bool:
        """Whether memory is shorter than predicted, so that candidates were left out that save some."""
        return self.first_too_large is not None

    @property
    def first_too_large(self) -> Candidate | None:
        """A trusted candidate that ran out of memory, or does not fit as now measured; None if all seem to fit."""
        if self._reuse is not None and not self._reuse.is_decided:
            return None
        for trial in self._context.trials:
            if trial.measurement.outcome is Outcome.OUT_OF_MEMORY and trial.candidate in self._trusted:
                return trial.candidate
        too_large = np.flatnonzero(~self._posterior.memory.may_fit_C[self._trusted_rows])
        return self._table.candidates[self._trusted_rows[too_large[0]]] if len(too_large) else None

    @property
    def ends_search(self) -> bool:
        """Whether a whole model ran well, and the answer is sure or another whole model makes it surer."""
        return self._request.verify and self._whole_models.ends_search

    def begin(self, number: int, suggestion: Suggestion) -> tuple[TrialTask, StepFigures]:
        """Begin the trial of a suggestion, which belongs to a trial of the study."""
        asked, self._asked = self._asked, None
        self._running[number] = AskedTrial(suggestion, asked) if asked else self._study.ask_for(suggestion)
        task = self._task(number, suggestion.row, TrialKind.COMPONENTS, suggestion.components)
        expected = self._figures(suggestion.row)
        self._posterior.knowledge.pending[number] = suggestion
        return task.model_copy(update={"again": suggestion.again}), expected

    def learn(
        self, number: int, suggestion: Suggestion, measurement: Measurement, awaited: Collection[Component]
    ) -> tuple[Measurement, StepFigures]:
        """Learn the components of a trial. A candidate is out of memory if its measured parts need too much."""
        row, posterior = suggestion.row, self._posterior
        posterior.knowledge.learn(number, measurement)
        # Communication is measured for all candidates of a sharding; it says nothing of this one.
        shared = any(c in self._table.communications for c in suggestion.components)
        if not shared:
            measurement = self._judge_memory(row, measurement, awaited)
        composes = measurement.outcome is Outcome.OK and not shared
        return measurement, StepFigures(
            posterior.bytes(row).peak if posterior.is_known(row) else None,
            posterior.seconds(row).tokens_per_second if composes else None,
            self._table.model.rate_unit,
        )

    def times_contaminated(self, component: Component) -> int:
        """Return how many trials have measured a component on a shared or throttled device."""
        return self._posterior.knowledge.log.count_contaminated(component)

    def is_measured(self, component: Component) -> bool:
        """Return whether a component was measured well."""
        return self._posterior.knowledge.log.count(component) > 0

    def row_of(self, trial: Trial) -> int | None:
        """Return the row of the candidate that a trial measured."""
        return self._table.row.get(trial.candidate)

    def trial_events(self, suggestion: Suggestion, trial: Trial) -> list[EventDraft]:
        """Return events of the trial, of the reuse of earlier measurements, and of the base as soon as it is known."""
        events = [trial_event(trial, suggestion, trial.seconds, self._exhausted_memory(trial))]
        if self._reuse is not None and self._reuse.is_decided and not self._is_reuse_reported:
            self._is_reuse_reported = True
            events.append(self._reuse.event())
        if self._base is None and self._is_reuse_reported and (base := self._base_runs.known()) is not None:
            self._base = base
            events.append(base_event(base, is_plainest=base == self._plainest))
        return events

    def _exhausted_memory(self, trial: Trial) -> PeakMemory | None:
        """Return what fills the memory of a candidate that ran out of it; None for one that did not."""
        row = self.row_of(trial)
        if row is None or trial.measurement.outcome is not Outcome.OUT_OF_MEMORY:
            return None
        return self._posterior.peak_memory(row)

    def tell(self, trial: Trial) -> None:
        """Finish the study's trial."""
        self._study.tell(self._running.pop(trial.number), trial)

    def _judge_memory(self, row: int, measurement: Measurement, awaited: Collection[Component]) -> Measurement:
        """Return the measurement as out of memory if its candidate's measured parts add up to more than the limit.

        Each part ran all the same. If the sum exceeds the limit by no more than its error, only the whole model
        decides.
        """
        is_awaited = any(component in awaited for component in self._table.decompositions[row].components)
        if measurement.outcome is not Outcome.OK or self._posterior.memory.may_fit_C[row] or is_awaited:
            return measurement
        memory, limit = self._posterior.bytes(row), self._posterior.limit_bytes
        reason = (
            f"a step needs {memory.required / GIB:.2f} GiB, {memory.peak / GIB:.2f} of it allocated; "
            f"the limit is {limit / GIB:.2f} GiB"
        )
        self._posterior.knowledge.reject(measurement.candidate, reason)
        return measurement.model_copy(update={"outcome": Outcome.OUT_OF_MEMORY, "reason": reason})

    def _task(self, number: int, row: int, kind: TrialKind, components: tuple[Component, ...] = ()) -> TrialTask:
        candidate = self._table.candidates[row]
        return TrialTask(
            number=number,
            kind=kind,
            model=self._table.model,
            candidate=candidate,
            components=components,
            num_processes=count_processes(kind, candidate, components, self._request, self._context.report.hardware),
            timeout_seconds=timeout_seconds(kind, self._request),
        )

    def _figures(self, row: int) -> StepFigures:
        return StepFigures(self._posterior.bytes(row).peak, self._posterior.seconds(row).tokens_per_second)

    def next_whole_model(self) -> NextCheck | None:
        """Return the recommended candidate, then runners-up, unless the request wants no whole models."""
        check = self._whole_models.next() if self._request.verify else None
        if check is None and not self._whole_models.trials:
            self._log.add(*self._noise_events())
        return check

    def _noise_events(self) -> list[EventDraft]:
        """Return the event that noise has ended the search, if it has."""
        best = self._posterior.recommend()
        if best is None or not self._noise.is_reached:
            return []
        return [noise_event(noise_figures(self._posterior, best.row), self._request.budget.confidence_target)]

    @property
    def is_cut_short(self) -> bool:
        """Whether noise keeps the confidence below its target, or noise or time whole models from raising it."""
        return self._noise.outweighs_whole_models or self._lacks_time

    @property
    def _lacks_time(self) -> bool:
        return self._request.verify and self._whole_models.lacks_time

    def begin_whole_model(self, number: int, check: NextCheck) -> tuple[TrialTask, StepFigures]:
        """Return the whole model of a candidate, and its composed step."""
        return self._task(number, check.row, TrialKind.WHOLE_MODEL), self._figures(check.row)

    def learn_whole_model(self, check: NextCheck, trial: Trial) -> tuple[Trial, list[EventDraft]]:
        """Correct the other candidates by a whole model; a changed answer is an event."""
        recommended, whole = self._recommended(), trial.measurement.whole_model
        if whole is not None:
            speed = whole_model_tokens_per_second(self._posterior, trial.candidate, whole)
            trial = trial.model_copy(update={"measured_peak_bytes": whole.peak_bytes, "tokens_per_second": speed})
        compared = compare_whole_run(self._posterior, check.row, trial)
        events = [] if self._whole_models.trials else self._noise_events()
        self._whole_models.learn(trial)
        memory = self._exhausted_memory(trial)
        events += [whole_model_event(trial, compared, check.probability_better, check.probability_fits, memory=memory)]
        answer = self._recommended()
        if recommended is not None and answer is not None and answer != recommended:
            events.append(answer_changed_event(recommended, answer))
        return trial, events

    def recommend(self, *, final: bool = False) -> Recommendation | None:
        """Return the present recommendation with its comparisons; None while no candidate is known well enough."""
        best = self._posterior.recommend()
        if best is None:
            return None
        recommended = self._table.candidates[best.row]
        ran = (t.candidate for t in self._context.trials if t.measurement.outcome is Outcome.OK)
        base = self._base or next(ran, recommended)
        of = self._whole_models.of
        alternatives = find_alternatives(
            self._posterior,
            best.row,
            self._context.report,
            of,
            self._whole_models.runner_up_of(recommended),
            final=final,
        )
        return build_recommendation(
            self._posterior,
            best,
            self._table.row[base],
            self._context.report,
            of(recommended),
            alternatives,
            final=final,
            out_of_budget=final and self._history.exhausted(self._context.index),
            out_of_time=final and self._lacks_time,
            limited_by_noise=final and self._noise.is_reached,
        )

    def importance(self) -> dict[str, float]:
        """Return the importance of each dimension among the candidates that are expected to fit, as now expected."""
        posterior = self._posterior
        rows = posterior.open_rows()
        rows = rows[posterior.memory.fits_C[rows]]
        candidates = [self._table.candidates[row] for row in rows]
        return importance_of_dimensions(candidates, posterior.mean_tokens_per_second()[rows])

    def _recommended(self) -> Candidate | None:
        best = self._posterior.recommend()
        return None if best is None else self._table.candidates[best.row]

    def explain(self) -> tuple[str, tuple[Relaxation, ...]]:
        """Return the reason: memory is short, every trial failed, or the budget was too small."""
        context = self._context
        memory_failed = self._history.failed_for_memory(context.variant)
        smallest = find_smallest(self._posterior, self._whole_models.trials, memory_failed=memory_failed)
        limit = memory_limit(self._request, context.report.hardware)
        is_unfinished = any(self._posterior.fits(int(row)) for row in self._posterior.open_rows())
        all_failed = memory_failed and not is_unfinished  # nothing that is expected to fit was left out
        if smallest.reported_factor * smallest.required_bytes > limit or all_failed:
            return explain_without_fit(self._request, context.report, context.model, smallest)
        failure = self._history.commonest_failure(context.variant)
        if failure is not None:
            return f"no candidate could be measured; most failed with {failure}", ()
        return "the budget ended before a candidate of the space was measured: raise max_seconds or max_trials", ()
