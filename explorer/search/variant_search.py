"""The exploration of one model variant: base, search, comparisons, whole-model checks."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from bexp.explorer.records.event import Progress
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.choices import find_dividing
from bexp.explorer.search.earlier_check import ignored_event
from bexp.explorer.search.event_messages import (
    answer_changed_event,
    base_event,
    no_base_event,
    trial_event,
    whole_model_event,
)
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.progress_log import ProgressLog
from bexp.explorer.search.pruned_space import PrunedSpace
from bexp.explorer.search.relaxations import SmallestCandidate
from bexp.explorer.search.report import (
    References,
    best_stock,
    build_recommendation,
    largest_untiled,
    largest_without_recompute,
)
from bexp.explorer.search.reported_runs import peak_factor, reported_event
from bexp.explorer.search.samplers import make_sampler
from bexp.explorer.search.study import Points, TrialStudy, params_of
from bexp.explorer.search.suggestion import Suggestion
from bexp.explorer.search.trial_scheduler import CompletedTrial, TrialScheduler
from bexp.explorer.search.variant_context import VariantContext
from bexp.explorer.search.verification import NextCheck, WholeModels, next_comparison
from bexp.explorer.search.whole_model_check import compare_whole_run, whole_model_tokens_per_second
from bexp.explorer.spec.candidate import Candidate

MOST_COMPARISONS = 6
"""The most trials in a row for the answer's comparisons. Each measures what another needs, or finds that it cannot."""


class VariantSearch:
    """Explores one variant with at least one candidate that may fit.

    Stored trials are taken from the history first: what they measured is not measured again, and the events that were
    stored with them are not emitted again.
    """

    def __init__(self, context: VariantContext, space: PrunedSpace, log: ProgressLog) -> None:
        assert space.table is not None, "at least one candidate may fit"
        self._context = context
        self._history = context.history
        self._log = log
        self._table = space.table
        self._plainest = space.bases[0]
        self._bases = tuple(c for c in space.bases if c in space.table.row)
        self._base: Candidate | None = None
        report = context.report
        self._posterior = Posterior.of(
            space.table, space.legal.candidates, context.request, report.hardware, report.reported_runs, report.earlier
        )
        if self._posterior.knowledge.reported and not context.trials:
            log.add(reported_event(self._posterior.knowledge.reported))
        if report.earlier.num_ignored and context.is_main and not context.trials:
            log.add(ignored_event(report.earlier))
        past = [t for t in context.trials if t.kind is TrialKind.COMPONENTS]
        for trial in past:
            self._posterior.knowledge.learn(trial.number, trial.measurement)
        points = Points([params_of(candidate) for candidate in self._table.candidates])
        sampler = make_sampler(context.request.sampler, self._posterior, points)
        self._study = TrialStudy(sampler, [(params_of(t.candidate), t) for t in past])
        for trial in self._history.trials:
            self._posterior.knowledge.learn_shared(trial.number, trial.measurement.components)
        self._reuse = self._posterior.knowledge.reuse
        self._is_reuse_told = self._reuse is None or self._reuse.is_decided
        self._scheduler = TrialScheduler(context, self._posterior, self._study)
        self._whole_models = WholeModels(self._posterior, self._history, context.index)

    def run(self) -> Generator[Progress, None, Recommendation | None]:
        """Explore until the confidence target or the budget is reached, then compare and check; returns the answer.

        Each `Progress` is stored before the next is asked for.
        """
        yield from self._check_earlier()
        yield from self._find_base()
        yield from self._finish_contaminated()
        while True:
            before = self._history.next_number
            yield from self._search()
            yield from self._compare()
            if self._history.next_number > before:
                continue
            check = self._whole_models.next() if self._context.request.verify else None
            if check is None:
                break
            yield from self._run_whole_model(check)
        return self._recommend(final=True)

    @property
    def smallest(self) -> SmallestCandidate:
        """The candidate with the smallest peak; of several, one whose whole model ran out of memory."""
        posterior, smallest = self._posterior, self._posterior.smallest_row
        ran_out = (t for t in self._whole_models.trials if t.measurement.outcome is Outcome.OUT_OF_MEMORY)
        rows = [self._table.row[t.candidate] for t in ran_out if t.candidate in self._table.row]
        alike = [row for row in rows if posterior.memory.required_C[row] <= posterior.memory.required_C[smallest]]
        row, failed = (alike[0], "its whole model") if alike else (smallest, None)
        is_measured, found = posterior.is_known(row), posterior.bytes(row)
        if failed is None and posterior.fits(row) and not (is_measured or posterior.is_open(row)):
            failed = "a component of it" if self._history.failed_for_memory(self._context.variant) else None
        factor = peak_factor(posterior.knowledge.reported)
        return SmallestCandidate(
            self._table.candidates[row], found.peak, found.required, is_measured, failed, reported_factor=factor
        )

    @property
    def is_unfinished(self) -> bool:
        """Whether a candidate that is expected to fit was not tried."""
        return any(self._posterior.fits(int(row)) for row in self._posterior.open_rows())

    # -- phases --------------------------------------------------------------------------------------------------

    def _check_earlier(self) -> Iterator[Progress]:
        """Measure a few components again that earlier explorations measured, before the others are trusted."""
        if self._reuse is not None and not self._reuse.is_decided:
            check = self._reuse.check
            yield from self._run(Suggestion(check.row, check.components, reason="a check of earlier measurements"))

    def _find_base(self) -> Iterator[Progress]:
        """Measure the bases in order of preference, until one fits."""
        yield from self._measure_communication()
        for candidate in self._bases:
            row = self._table.row[candidate]
            if not self._posterior.is_known(row) and self._posterior.is_open(row):
                yield from self._run(self._complete(row, "a base"))
            if self._posterior.is_known(row) and self._posterior.is_open(row) and self._posterior.fits(row):
                self._base = candidate
                break
        checked = None if self._reuse is None else self._table.candidates[self._reuse.check.row]
        if self._base is None and all(t.candidate in {*self._bases, checked} for t in self._context.trials):
            self._log.add(no_base_event())
        self._log.resume(self._recommend())

    def _measure_communication(self) -> Iterator[Progress]:
        """Measure communication on all devices, once for each sharding, because no other component predicts it."""
        for communication in self._table.communications:
            known = self._posterior.knowledge.measured.get(communication)
            if known is not None and known.host_once_seconds is not None:  # earlier versions left out the host
                continue
            candidates = (*self._bases, *self._table.candidates)
            candidate = next(c for c in candidates if c.sharding is communication.sharding)
            row = self._table.row[candidate]
            if self._posterior.is_open(row):
                yield from self._run(Suggestion(row, (communication,), reason="communication between devices"))

    def _finish_contaminated(self) -> Iterator[Progress]:
        """Repeat a contaminated trial that was the last before a resume."""
        past = self._context.trials
        if past and past[-1].kind is TrialKind.COMPONENTS:
            self._scheduler.repeat_contaminated(past[-1])
            for completed in self._scheduler.complete_all():
                yield from self._report(completed)

    def _search(self) -> Iterator[Progress]:
        """Keep as many trials in flight as allowed, while they are worth it."""
        while True:
            while self._scheduler.has_room and self._begin_next():
                pass
            if not self._scheduler.num_in_flight:
                return
            yield from self._report(self._scheduler.complete_next())

    def _begin_next(self) -> bool:
        """Begin a trial that is queued, else the one that the study suggests; returns whether there was one."""
        if self._scheduler.begin_due():
            return True
        if self._is_settled():
            return False
        started = self._context.clock()
        asked = self._study.ask()
        if asked is None:
            return False
        self._scheduler.queue_asked(asked, self._context.clock() - started)
        return self._scheduler.begin_due()

    def _is_settled(self) -> bool:
        """Whether the search is over, whatever would be suggested."""
        if self._history.is_hopeless(self._context.variant) or self._whole_models.ends_search:
            return True
        confidence, index = self._posterior.search_confidence, self._context.index
        # The search may overdraw its budget until there is one candidate to recommend.
        if self._history.overdrawn(index) or (confidence is not None and self._history.exhausted(index)):
            return True
        return confidence is not None and 100 * confidence >= self._context.request.budget.confidence_target

    def _compare(self) -> Iterator[Progress]:
        """Measure what the answer still needs."""
        for _ in range(MOST_COMPARISONS):
            # After whole models have changed the answer, only the answer itself is completed, not its comparisons.
            spent = 0.0 if self._whole_models.ends_search else self._history.device_seconds
            suggestion = next_comparison(self._posterior, self._context.report, spent)
            hopeless = self._history.is_hopeless(self._context.variant)
            if suggestion is None or hopeless or self._history.overdrawn(self._context.index):
                return
            yield from self._run(suggestion)

    # -- trials --------------------------------------------------------------------------------------------------

    def _complete(self, row: int, reason: str) -> Suggestion:
        return Suggestion(row, self._posterior.missing(row), reason=reason)

    def _run(self, suggestion: Suggestion) -> Iterator[Progress]:
        """Measure what the search itself needs, with nothing else in flight."""
        self._scheduler.queue(suggestion)
        for completed in self._scheduler.complete_all():
            yield from self._report(completed)

    def _report(self, completed: CompletedTrial) -> Iterator[Progress]:
        """Yield a trial that has ended. Once it is stored, tell it to the study."""
        trial, suggestion = completed.trial, completed.asked.suggestion
        events = [trial_event(trial, suggestion, trial.seconds)]
        if self._reuse is not None and self._reuse.is_decided and not self._is_reuse_told:
            self._is_reuse_told = True
            events.append(self._reuse.event())
        if self._base is None and self._is_reuse_told and (base := self._known_base()) is not None:
            self._base = base
            events.append(base_event(base, is_plainest=base == self._plainest))
        yield self._log.step(trial, events, self._recommend())
        self._study.tell(completed.asked, trial)

    def _known_base(self) -> Candidate | None:
        """The first base that fits, if it is measured in full; null if one before it may fit and is not measured."""
        for candidate in self._bases:
            row = self._table.row[candidate]
            if self._posterior.is_open(row):
                if not self._posterior.is_known(row):
                    return None
                if self._posterior.fits(row):
                    return candidate
        return None

    def _run_whole_model(self, check: NextCheck) -> Iterator[Progress]:
        """Run a whole model and learn from it."""
        row = self._table.row[check.candidate]
        recommended = self._recommended()
        measurement, seconds = self._scheduler.run_whole(check.candidate)
        whole = measurement.whole_model
        trial = Trial(
            number=self._history.next_number,
            kind=TrialKind.WHOLE_MODEL,
            measurement=measurement,
            predicted_peak_bytes=self._posterior.bytes(row).peak,
            measured_peak_bytes=whole.peak_bytes if whole else None,
            predicted_tokens_per_second=self._posterior.seconds(row).tokens_per_second,
            tokens_per_second=whole_model_tokens_per_second(self._posterior, check.candidate, whole) if whole else None,
            seconds=seconds,
        )
        self._history.add(trial)
        found = compare_whole_run(self._posterior, row, trial)
        self._whole_models.learn(trial)
        events = [whole_model_event(trial, found, check.probability_better, check.probability_fits)]
        answer = self._recommended()
        if recommended is not None and answer is not None and answer != recommended:
            events.append(answer_changed_event(recommended, answer))
        yield self._log.step(trial, events, self._recommend())

    # -- the answer ----------------------------------------------------------------------------------------------

    def _recommend(self, *, final: bool = False) -> Recommendation | None:
        """What is recommended now, with its comparisons; null while no candidate is known well enough."""
        best = self._posterior.recommend()
        if best is None:
            return None
        base = self._base or self._first_feasible() or self._table.candidates[best.row]
        recommended = self._table.candidates[best.row]
        rows = self._posterior.open_rows() if final else self._posterior.known_rows()
        references = References(
            base=self._table.row[base],
            largest=largest_untiled(self._posterior, among=rows),
            largest_without_recompute=largest_without_recompute(self._posterior, among=rows),
            stock=best_stock(self._posterior, self._context.report, among=rows),
        )
        checked, rival = self._whole_models.of(recommended), self._whole_models.runner_up_of(recommended)
        dividing = find_dividing(self._posterior, best.row, self._whole_models.of)
        out_of_budget = final and self._history.exhausted(self._context.index)
        return build_recommendation(
            self._posterior,
            best,
            references,
            self._context.report,
            checked,
            rival,
            dividing,
            final=final,
            out_of_budget=out_of_budget,
        )

    def _recommended(self) -> Candidate | None:
        best = self._posterior.recommend()
        return None if best is None else self._table.candidates[best.row]

    def _first_feasible(self) -> Candidate | None:
        return next((t.candidate for t in self._context.trials if t.measurement.outcome is Outcome.OK), None)
