"""The exploration of one model variant: base, search, comparisons, whole-model checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from explorer.cost_model.step import memory_limit
from explorer.records.event import EventDraft, Progress, recommendation_event, render_message
from explorer.records.measurement import Outcome
from explorer.records.recommendation import Recommendation, Relaxation
from explorer.records.trial import Measure, Trial, TrialKind
from explorer.search.acquisition import Suggestion
from explorer.search.event_messages import (
    answer_changed_event,
    base_event,
    no_base_event,
    trial_event,
    whole_model_event,
)
from explorer.search.history import TrialHistory
from explorer.search.optuna_sampler import frozen_trial, tell, to_candidate
from explorer.search.relaxations import explain_nothing_fits, find_relaxations, smallest_requirement
from explorer.search.report import (
    References,
    best_stock,
    build_recommendation,
    check_whole_model,
    largest_untiled,
    largest_without_recompute,
    whole_model_tokens_per_second,
)
from explorer.search.setup import OpenStudy, PruneSpace, open_variant, prune_space
from explorer.search.trial_scheduler import CompletedTrial, TrialScheduler
from explorer.search.verification import NextCheck, WholeModels, next_comparison
from explorer.spec.candidate import Candidate
from explorer.spec.hardware import DeviceReport
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest

MOST_COMPARISONS = 6  # each measures what another needs, or learns that it cannot be


class VariantSearch:
    """Runs one variant as a generator of `Progress`; `recommendation`, or `reason` and `remedies`, are its result.

    Stored trials are taken from the history first: what they measured is not measured again, and the events that were
    stored with them are not emitted again.
    """

    def __init__(
        self,
        index: int,
        request: ExplorationRequest,
        report: DeviceReport,
        measure: Measure,
        history: TrialHistory,
        open_study: OpenStudy,
        *,
        clock: Callable[[], float] = time.perf_counter,
        prune: PruneSpace = prune_space,
    ) -> None:
        self.model: ModelSpec = request.variants()[index]
        self.recommendation: Recommendation | None = None
        self.reason: str | None = None
        self.remedies: tuple[Relaxation, ...] = ()
        self._index = index
        self._request = request
        self._report = report
        self._measure = measure
        self._history = history
        self._open_study = open_study
        self._clock = clock
        self._prune = prune

    def run(self) -> Iterator[Progress]:
        """Explore until the confidence target or the budget is reached, then compare and check."""
        self._opening, setup = open_variant(
            self._index, self.model, self._request, self._report, self._history, self._open_study, self._prune
        )
        if setup is None:
            events, space = self._opening.take()
            yield Progress(events=tuple(events), space=space)
            self.reason = self._explain_nothing_fits()
            return
        self._setup = setup
        self._table, self._state = setup.table, setup.state
        self._scheduler = TrialScheduler(
            self._index, self._request, self._report, self._measure, self._history, setup, self._clock
        )
        self._base: Candidate | None = None
        self._last_line = ""
        self._whole_models = WholeModels(self._state, self._history, self._index)
        yield from self._find_base()
        past = self._history.trials_of(self.model.query_groups)
        if past and past[-1].kind is TrialKind.COMPONENTS:  # it may have been the last before a resume
            self._scheduler.repeat_contaminated(past[-1])
            for completed in self._scheduler.land_all():
                yield from self._take_in(completed)
        while True:
            before = self._history.next_number
            yield from self._search()
            yield from self._compare()
            if self._history.next_number > before:
                continue
            check = self._whole_models.next() if self._request.verify else None
            if check is None:
                break
            yield from self._run_whole_model(check)
        self.recommendation = self._recommend(final=True)
        if self.recommendation is None:
            self.reason = self._explain()

    def _explain(self) -> str:
        """Why there is no recommendation: memory, or what the trials failed of."""
        smallest = smallest_requirement(self._request, self._report, self.model)
        failure = self._history.commonest_failure(self.model.query_groups)
        if smallest <= memory_limit(self._request, self._report.hardware):
            if failure is not None:
                return f"no candidate could be measured; most failed with {failure}"
            return "the budget ended before a candidate of the space was measured: raise max_seconds or max_trials"
        return self._explain_nothing_fits()

    def _explain_nothing_fits(self) -> str:
        self.remedies = find_relaxations(self._request, self._report, self.model)
        return explain_nothing_fits(self._request, self._report, self.model, self.remedies)

    # -- phases --------------------------------------------------------------------------------------------------

    def _find_base(self) -> Iterator[Progress]:
        yield from self._measure_communication()
        for candidate in self._setup.bases:
            row = self._table.row[candidate]
            if not self._state.is_known(row) and self._state.is_open(row):
                yield from self._run(candidate)
            if self._state.is_known(row) and self._state.is_open(row) and self._state.fits(row):
                self._base = candidate
                break
        past = self._history.trials_of(self.model.query_groups)
        if self._base is None and all(t.candidate in self._setup.bases for t in past):
            self._opening.events.append(no_base_event())
        recommendation = self._recommend()
        if recommendation is not None:  # after a resume: the line that was stored last is not said again
            self._last_line = render_message(recommendation_event(recommendation))

    def _measure_communication(self) -> Iterator[Progress]:
        """Of all candidates of a sharding alike, by all devices: first, as nothing leads to expect it, by itself."""
        for communication in self._table.communications:
            known = self._state.measured.get(communication)
            if known is not None and known.host_once_seconds is not None:  # earlier versions left out the host
                continue
            candidates = (*self._setup.bases, *self._table.candidates)
            candidate = next(c for c in candidates if c.sharding is communication.sharding)
            row = self._table.row[candidate]
            if self._state.is_open(row):
                yield from self._run(candidate, Suggestion(row, (communication,)))

    def _search(self) -> Iterator[Progress]:
        """Keep as many trials in flight as there may be, while they are worth it."""
        while True:
            while self._scheduler.has_room and self._begin_next():
                pass
            if not self._scheduler:
                return
            yield from self._take_in(self._scheduler.land())

    def _begin_next(self) -> bool:
        """Begin an order that is due, else what the study suggests; returns whether there was anything."""
        if self._scheduler.begin_due():
            return True
        if self._is_settled():
            return False
        started = self._clock()
        suggestion = self._state.suggest()
        if suggestion is None:
            return False
        asked = self._setup.study.ask(self._setup.distributions)
        candidate = to_candidate(asked.params, self.model.query_groups)
        assert candidate == self._table.candidates[suggestion.row], "the study and the search share one state"
        self._scheduler.order(candidate, suggestion, asked, self._clock() - started)
        return self._scheduler.begin_due()

    def _is_settled(self) -> bool:
        """Whether nothing new is to be searched for, whatever would be suggested."""
        if self._history.is_hopeless(self.model.query_groups) or self._whole_models.ends_search:
            return True
        verdict = self._state.recommend()
        # Until one candidate can be recommended, the search may overdraw its budget to find it.
        if self._history.overdrawn(self._index) or (verdict and self._history.exhausted(self._index)):
            return True
        return verdict is not None and 100 * verdict.probability >= self._request.budget.confidence_target

    def _compare(self) -> Iterator[Progress]:
        """Measure what the answer still needs."""
        for _ in range(MOST_COMPARISONS):
            # Of an answer that whole models have changed, no more than itself: other figures are as they were.
            spent = 0.0 if self._whole_models.ends_search else self._history.device_seconds
            suggestion = next_comparison(self._state, self._report, spent)
            if suggestion is None or self._history.overdrawn(self._index):
                return
            yield from self._run(self._table.candidates[suggestion.row], suggestion)

    # -- trials --------------------------------------------------------------------------------------------------

    def _run(self, candidate: Candidate, suggestion: Suggestion | None = None) -> Iterator[Progress]:
        """Measure what is suggested of a candidate, by default all that is missing, with nothing else in flight."""
        row = self._table.row[candidate]
        missing = self._table.missing(row, self._state.surrogate.known_K)
        self._scheduler.order(candidate, suggestion or Suggestion(row, missing))
        for completed in self._scheduler.land_all():
            yield from self._take_in(completed)

    def _take_in(self, completed: CompletedTrial) -> Iterator[Progress]:
        """Tell of a trial that has ended; the study learns of it when it is stored."""
        trial, order, row = completed.trial, completed.order, completed.order.suggestion.row
        events = [trial_event(trial, order.suggestion, trial.seconds)]
        ok, candidate = trial.measurement.outcome is Outcome.OK, trial.candidate
        if self._base is None and ok and candidate in self._setup.bases and self._state.is_known(row):
            self._base = candidate
            events.append(base_event(candidate, is_plainest=candidate == self._setup.plainest))
        yield self._progress(trial, events)
        if order.asked is not None:
            tell(self._setup.study, order.asked, trial)
        else:
            self._setup.study.add_trial(frozen_trial(trial, self._setup.distributions))

    def _run_whole_model(self, check: NextCheck) -> Iterator[Progress]:
        row = self._table.row[check.candidate]
        recommended = self._recommended()
        measurement, seconds = self._scheduler.run_whole(check.candidate)
        whole = measurement.whole_model
        trial = Trial(
            number=self._history.next_number,
            kind=TrialKind.WHOLE_MODEL,
            measurement=measurement,
            predicted_peak_bytes=self._state.bytes(row).peak,
            measured_peak_bytes=whole.peak_bytes if whole else None,
            predicted_tokens_per_second=self._state.seconds(row).tokens_per_second,
            tokens_per_second=whole_model_tokens_per_second(self._state, check.candidate, whole) if whole else None,
            seconds=seconds,
        )
        self._history.add(trial)
        found = check_whole_model(self._state, row, trial)
        self._whole_models.take_in(trial)
        events = [whole_model_event(trial, found, check.probability_better)]
        answer = self._recommended()
        if recommended is not None and answer is not None and answer != recommended:
            events.append(answer_changed_event(recommended, answer))
        yield self._progress(trial, events)

    # -- what is handed out --------------------------------------------------------------------------------------

    def _recommend(self, *, final: bool = False) -> Recommendation | None:
        verdict = self._state.recommend()
        if verdict is None:
            return None
        base = self._base or self._first_feasible() or self._table.candidates[verdict.row]
        rows = self._state.open_rows() if final else self._state.known_rows()
        references = References(
            base=self._table.row[base],
            largest=largest_untiled(self._state, among=rows),
            largest_without_recompute=largest_without_recompute(self._state, among=rows),
            stock=best_stock(self._state, self._report, among=rows),
        )
        recommended = self._table.candidates[verdict.row]
        checked, rival = self._whole_models.of(recommended), self._whole_models.runner_up_of(recommended)
        return build_recommendation(self._state, verdict, references, self._report, checked, rival)

    def _recommended(self) -> Candidate | None:
        verdict = self._state.recommend()
        return None if verdict is None else self._table.candidates[verdict.row]

    def _first_feasible(self) -> Candidate | None:
        trials = self._history.trials_of(self.model.query_groups)
        return next((t.candidate for t in trials if t.measurement.outcome is Outcome.OK), None)

    def _progress(self, trial: Trial, events: list[EventDraft]) -> Progress:
        recommendation = self._recommend()
        opening, space = self._opening.take()
        drafts = [*opening, *events]
        if recommendation is not None:
            event = recommendation_event(recommendation)
            if render_message(event) != self._last_line:
                self._last_line = render_message(event)
                drafts.append(event)
        shown = recommendation if self._index == 0 else None
        return Progress(events=tuple(drafts), trial=trial, recommendation=shown, space=space)
