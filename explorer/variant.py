"""The exploration of one model variant: base, search, comparisons, whole-model check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import Trial as OptunaTrial

from explorer.answers import (
    References,
    best_stock,
    build_recommendation,
    check_whole_model,
    largest_untiled,
    whole_model_tokens_per_second,
)
from explorer.belief import Belief
from explorer.candidates import Candidate
from explorer.components import Component
from explorer.composition import GIB, memory_limit
from explorer.events import EventDraft, recommendation_event, render_message
from explorer.hardware import DeviceReport
from explorer.ledger import Ledger
from explorer.measurements import Measurement, Outcome
from explorer.memory import predict_memory
from explorer.models import ModelSpec
from explorer.narration import (
    base_event,
    no_base_event,
    space_event,
    trial_event,
    variant_event,
    whole_model_event,
)
from explorer.progress import Progress
from explorer.recommendations import Recommendation
from explorer.remedies import explain_nothing_fits
from explorer.requests import ExplorationRequest
from explorer.sampler import ComponentSampler, distributions, frozen_trial, reconcile, tell, to_candidate
from explorer.space import base_candidates, enumerate_candidates
from explorer.table import SpaceTable
from explorer.trials import Measure, Trial, TrialKind, TrialPlan

OPTIMISTIC_ACTIVATIONS = 0.7
"""A candidate is left out unmeasured only if it would not fit with this share of its predicted activations."""
ATTEMPTS = 3  # what is predicted to fit may not, once measured
WHOLE_MODEL_TIMEOUT_FACTOR = 3  # a whole model builds all its layers

OpenStudy = Callable[[str, BaseSampler], Study]


class VariantSearch:
    """Runs one variant as a generator of `Progress`; `recommendation` and `reason` hold its result afterwards.

    Stored trials are taken from the ledger first: what they measured is not measured again, and the events that were
    stored with them are not emitted again.
    """

    def __init__(
        self,
        index: int,
        request: ExplorationRequest,
        report: DeviceReport,
        measure: Measure,
        ledger: Ledger,
        open_study: OpenStudy,
    ) -> None:
        self.model: ModelSpec = request.variants()[index]
        self.recommendation: Recommendation | None = None
        self.reason: str | None = None
        self._index = index
        self._request = request
        self._report = report
        self._measure = measure
        self._ledger = ledger
        self._open_study = open_study

    def run(self) -> Iterator[Progress]:
        """Explore until the confidence target or the budget is reached, then compare and check."""
        self._prepare()
        if self._table is None:
            self.reason = explain_nothing_fits(self._request, self._report, self.model)
            return
        yield from self._find_base()
        yield from self._search()
        yield from self._compare()
        yield from self._check_whole_model()
        self.recommendation = self._recommend()
        if self.recommendation is None:
            self.reason = explain_nothing_fits(self._request, self._report, self.model)

    # -- phases --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Enumerate the space, drop what is predicted not to fit, and take in what is stored."""
        request, hardware = self._request, self._report.hardware
        space = enumerate_candidates(request, self._report, self.model)
        members = set(space.candidates)
        bases = base_candidates(request, self._report, self.model)
        everything = SpaceTable((*space.candidates, *(c for c in bases if c not in members)), self.model, request)
        required = predict_memory(everything, hardware, activation_share=OPTIMISTIC_ACTIVATIONS)
        limit = memory_limit(request, hardware)
        fitting = [c for c, need in zip(everything.candidates, required, strict=True) if need <= limit]
        legal = [c for c in fitting if c in members]
        self._plainest = bases[0]
        self._bases = [c for c in bases if c in fitting]
        self._base: Candidate | None = None
        self._last_line = ""
        self._table: SpaceTable | None = None
        if not legal:
            return
        space_left = space.restrict(legal)
        self._table = SpaceTable(fitting, self.model, request)
        self._belief = Belief(self._table, legal, request, hardware)
        self._distributions = distributions(self._table.candidates)
        name = "" if self._index == 0 else f"num_query_groups={self.model.query_groups}"
        self._study = self._open_study(name, ComponentSampler(self._belief))
        past = self._ledger.trials_of(self.model.query_groups)
        reconcile(self._study, past, self._distributions)
        self._belief.learn(
            t.measurement
            for t in past
            if t.kind is TrialKind.COMPONENTS or t.measurement.outcome is Outcome.OUT_OF_MEMORY
        )
        for trial in past:
            self._take_in_check(trial)
        self._space_summary = space_left.summarize()
        self._opening = []
        if not past:
            if len(request.variants()) > 1:
                self._opening.append(variant_event(self.model))
            self._opening.append(space_event(space_left, len(space.candidates) - len(legal), limit))

    def _find_base(self) -> Iterator[Progress]:
        assert self._table is not None
        for candidate in self._bases:
            row = self._table.row[candidate]
            if not self._belief.is_known(row) and self._belief.is_open(row):
                yield from self._run(candidate)
            if self._belief.is_known(row) and self._belief.is_open(row) and self._belief.fits(row):
                self._base = candidate
                break
        past = self._ledger.trials_of(self.model.query_groups)
        if self._base is None and all(t.candidate in self._bases for t in past):
            self._opening.append(no_base_event())
        recommendation = self._recommend()
        if recommendation is not None:  # after a resume: the line that was stored last is not said again
            self._last_line = render_message(recommendation_event(recommendation))

    def _search(self) -> Iterator[Progress]:
        target = self._request.budget.confidence_target
        while not (self._ledger.exhausted(self._index) or self._was_checked()):
            verdict = self._belief.recommend()
            if verdict is not None and 100 * verdict.probability >= target:
                return
            started = time.perf_counter()
            if self._belief.suggest() is None:
                return
            asked = self._study.ask(self._distributions)
            candidate = to_candidate(asked.params, self.model.query_groups)
            yield from self._run(candidate, asked, time.perf_counter() - started)

    def _compare(self) -> Iterator[Progress]:
        """Measure what the answer is compared with."""
        assert self._table is not None
        if self._was_checked():
            return
        for find in (largest_untiled, lambda belief: best_stock(belief, self._report)):
            for _ in range(ATTEMPTS):
                row = find(self._belief)
                if row is None or self._belief.is_known(row) or self._ledger.overdrawn(self._index):
                    break
                yield from self._run(self._table.candidates[row])

    def _check_whole_model(self) -> Iterator[Progress]:
        assert self._table is not None
        if not self._request.verify:
            return
        for _ in range(ATTEMPTS):
            verdict = self._belief.recommend()
            if verdict is None:
                return
            candidate = self._table.candidates[verdict.row]
            trial = self._ledger.whole_model(candidate)
            if trial is not None:
                return
            yield from self._run_whole_model(candidate)

    # -- trials --------------------------------------------------------------------------------------------------

    def _run(
        self, candidate: Candidate, asked: OptunaTrial | None = None, suggest_seconds: float = 0.0
    ) -> Iterator[Progress]:
        assert self._table is not None
        row = self._table.row[candidate]
        predicted_peak = self._belief.bytes(row).peak
        expected = self._belief.seconds(row).tokens_per_second
        missing = self._table.missing(row, self._belief.surrogate.known_K)
        started = time.perf_counter()
        measurement = self._measure(self._plan(candidate, TrialKind.COMPONENTS, missing))
        measured = time.perf_counter()
        self._belief.learn([measurement])
        measurement = self._judge(row, measurement)
        ok = measurement.outcome is Outcome.OK
        trial = Trial(
            number=self._ledger.next_number,
            kind=TrialKind.COMPONENTS,
            measurement=measurement,
            predicted_peak_bytes=predicted_peak,
            measured_peak_bytes=self._belief.bytes(row).peak if self._belief.is_known(row) else None,
            predicted_tokens_per_second=expected,
            tokens_per_second=self._belief.seconds(row).tokens_per_second if ok else None,
            suggest_seconds=suggest_seconds + time.perf_counter() - measured,
        )
        self._ledger.add(trial, measured - started)
        events = [trial_event(trial, len(missing), measured - started)]
        if self._base is None and ok and candidate in self._bases:
            self._base = candidate
            events.append(base_event(candidate, is_plainest=candidate == self._plainest))
        yield self._progress(trial, events)
        if asked is not None:
            tell(self._study, asked, trial)
        else:
            self._study.add_trial(frozen_trial(trial, self._distributions))

    def _judge(self, row: int, measurement: Measurement) -> Measurement:
        """A candidate whose measured parts add up to more than the limit is out of memory, though each part ran."""
        if measurement.outcome is not Outcome.OK or self._belief.fits(row):
            return measurement
        found, limit = self._belief.bytes(row), self._belief.limit_bytes
        reason = (
            f"a step needs {found.required / GIB:.2f} GiB, {found.peak / GIB:.2f} of it allocated; "
            f"the limit is {limit / GIB:.2f} GiB"
        )
        judged = measurement.model_copy(update={"outcome": Outcome.OUT_OF_MEMORY, "reason": reason})
        self._belief.learn([judged])
        return judged

    def _run_whole_model(self, candidate: Candidate) -> Iterator[Progress]:
        assert self._table is not None
        row = self._table.row[candidate]
        started = time.perf_counter()
        measurement = self._measure(self._plan(candidate, TrialKind.WHOLE_MODEL, ()))
        seconds = time.perf_counter() - started
        whole = measurement.whole_model
        trial = Trial(
            number=self._ledger.next_number,
            kind=TrialKind.WHOLE_MODEL,
            measurement=measurement,
            predicted_peak_bytes=self._belief.bytes(row).peak,
            measured_peak_bytes=whole.peak_bytes if whole else None,
            predicted_tokens_per_second=self._belief.seconds(row).tokens_per_second,
            tokens_per_second=whole_model_tokens_per_second(self._belief, candidate, whole) if whole else None,
        )
        self._ledger.add(trial, seconds)
        if measurement.outcome is Outcome.OUT_OF_MEMORY:
            self._belief.reject(candidate, measurement.reason or "the whole model does not fit")
        check = check_whole_model(self._belief, row, trial)
        self._take_in_check(trial)
        yield self._progress(trial, [whole_model_event(trial, check)])

    def _take_in_check(self, trial: Trial) -> None:
        assert self._table is not None
        if trial.kind is TrialKind.WHOLE_MODEL and trial.candidate in self._table.row:
            check = check_whole_model(self._belief, self._table.row[trial.candidate], trial)
            if check is not None:
                self._belief.learn_composition_error(check.step_error)

    def _was_checked(self) -> bool:
        """Whether a whole model was run: an earlier lease had ended its search before that."""
        trials = self._ledger.trials_of(self.model.query_groups)
        return any(trial.kind is TrialKind.WHOLE_MODEL for trial in trials)

    def _plan(self, candidate: Candidate, kind: TrialKind, components: tuple[Component, ...]) -> TrialPlan:
        timeout = self._request.budget.trial_timeout_seconds
        return TrialPlan(
            number=self._ledger.next_number,
            kind=kind,
            model=self.model,
            candidate=candidate,
            components=components,
            timeout_seconds=timeout * (WHOLE_MODEL_TIMEOUT_FACTOR if kind is TrialKind.WHOLE_MODEL else 1),
        )

    # -- what is handed out --------------------------------------------------------------------------------------

    def _recommend(self) -> Recommendation | None:
        assert self._table is not None
        verdict = self._belief.recommend()
        if verdict is None:
            return None
        base = self._base or self._first_feasible() or self._table.candidates[verdict.row]
        references = References(
            base=self._table.row[base],
            largest=largest_untiled(self._belief),
            stock=best_stock(self._belief, self._report),
        )
        checked = self._ledger.whole_model(self._table.candidates[verdict.row])
        return build_recommendation(self._belief, verdict, references, self._report, checked)

    def _first_feasible(self) -> Candidate | None:
        trials = self._ledger.trials_of(self.model.query_groups)
        return next((t.candidate for t in trials if t.measurement.outcome is Outcome.OK), None)

    def _progress(self, trial: Trial, events: list[EventDraft]) -> Progress:
        recommendation = self._recommend()
        drafts = [*self._opening, *events]
        space = self._space_summary if self._opening and self._index == 0 else None
        self._opening = []
        if recommendation is not None:
            event = recommendation_event(recommendation)
            if render_message(event) != self._last_line:
                self._last_line = render_message(event)
                drafts.append(event)
        shown = recommendation if self._index == 0 else None
        return Progress(events=tuple(drafts), trial=trial, recommendation=shown, space=space)
