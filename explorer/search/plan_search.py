"""The search for a mesh, and how each of its devices runs its share, for a machine that is described or there.

The space is searched in stages. Formulas rank the meshes, then the candidates of the best meshes, and those that remain
are measured block by block, the most promising first. Meshes share most of their blocks. If the worker has the devices,
what they exchange is measured first, and the best candidates run as whole models in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from bexp.explorer.cost_model.components import Component
from bexp.explorer.cost_model.mesh_layers import MeshCandidate
from bexp.explorer.cost_model.parameters import count_parameters
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import EventDraft, Progress, recommendation_event, render_message
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Measurement, Outcome, judge
from bexp.explorer.records.recommendation import Answer, Recommendation, Relaxation, VariantAnswer
from bexp.explorer.records.trial import Measure, Trial, TrialKind, TrialPlan, timeout_seconds
from bexp.explorer.search.event_messages import end_event, whole_model_event
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.legal_space import EmptySpaceError
from bexp.explorer.search.mesh_check import MeshChecks
from bexp.explorer.search.plan_events import blocks_event, exchange_event, opening
from bexp.explorer.search.plan_ranking import PlanRanker, Ranking, plainness
from bexp.explorer.search.plan_relaxations import explain_no_mesh_fits, find_plan_relaxations
from bexp.explorer.search.plan_report import recommend_plan
from bexp.explorer.search.plan_space import PlanSpace
from bexp.explorer.search.trial_executor import executor_of
from bexp.explorer.spec.mesh import MeshRun
from bexp.explorer.spec.request import ExplorationRequest

SCREENINGS = 3
"""How often the whole space is ranked, each time with what has been measured until then."""


def explore_plan(
    request: ExplorationRequest,
    report: DeviceReport,
    measure: Measure,
    *,
    history: Sequence[Trial],
    clock: Callable[[], float],
) -> Iterator[Progress]:
    """Run a plan and yield the results step by step, as `bexp.explorer.search.explore.explore` does."""
    answer = VariantAnswer(
        num_query_groups=request.shapes.query_groups,
        num_parameters=count_parameters(request.shapes),
        recommendation=None,
    )
    try:
        space = PlanSpace(request, report)
    except EmptySpaceError as error:
        answer = answer.model_copy(update={"reason": str(error)})
    else:
        search = PlanSearch(space, report, measure, history, clock)
        found = yield from search.run()
        reason = None if found else search.reason
        target = search.completed_target if found else None
        fields = {"recommendation": found, "reason": reason, "remedies": search.remedies, "completed_target": target}
        answer = answer.model_copy(update=fields)
    whole = Answer(variants=(answer,))
    yield Progress(events=(end_event(whole),), recommendation=whole.recommendation, answer=whole)


class PlanSearch:
    """One plan on one device. Stored trials are learnt first, and nothing in them is measured again."""

    def __init__(
        self,
        space: PlanSpace,
        report: DeviceReport,
        measure: Measure,
        history: Sequence[Trial],
        clock: Callable[[], float],
    ) -> None:
        self._space = space
        self._report = report
        self._executor = executor_of(measure)
        self._clock = clock
        self._history = TrialHistory(history, space.request.budget, 1)
        self._contaminated: dict[Component, int] = {}
        self._is_resumed = bool(history)
        for trial in history:
            self._learn(trial.measurement)
        self._checks = MeshChecks(space)
        self._ranker = PlanRanker(space, self._checks)
        self._checks.learn(history)
        space.factor = self._checks.factor
        self._last_message = ""
        self.remedies: tuple[Relaxation, ...] = ()
        self.reason = "the budget ended before a mesh was measured: raise max_seconds or max_trials"

    @property
    def completed_target(self) -> int | None:
        """The confidence target, if neither the budget nor failing trials have ended the search."""
        is_cut_short = self._is_spent() or self._history.is_hopeless(self._space.request.shapes.variant)
        return None if is_cut_short else self._space.request.budget.confidence_target

    def run(self) -> Generator[Progress, None, Recommendation | None]:
        """Measure until the confidence target or the budget is reached; returns the recommendation."""
        started = self._clock()
        exchanges = [c for c in self._space.exchanges if c not in self._space.measured]
        if exchanges and self._space.candidates:
            yield self._measure_exchanges(exchanges)
        pool = self._ranker.screen()
        base = min(pool, key=plainness, default=None)
        if not self._is_resumed:
            yield opening(self._space, len(pool), base)
        if base is None:
            self.remedies = find_plan_relaxations(self._space.request, self._report)
            self.reason = explain_no_mesh_fits(self._ranker.smallest, self._space.limit_bytes, self.remedies)
            return None
        ranking = self._ranker.rank(pool)
        if self._is_resumed and (known := self._recommend(ranking, base)) is not None:
            self._last_message = render_message(recommendation_event(known))
        if self._space.missing(base) and self._space.is_open(base):
            ranking = yield from self._measure(base, self._clock() - started, pool, base)
        for _ in range(SCREENINGS):
            before = len(self._space.measured)
            ranking = yield from self._measure_likely(ranking, pool, base)
            if self._is_spent() or len(self._space.measured) == before:
                break
            pool = list(dict.fromkeys([*self._ranker.screen(), base]))  # with what is known now
            ranking = self._ranker.rank(pool)
        if self._space.request.devices.is_mesh:
            ranking = yield from self._run_whole_models(ranking, pool, base)
        return self._recommend(ranking, base)

    def _run_whole_models(
        self, ranking: Ranking, pool: Sequence[MeshCandidate], base: MeshCandidate
    ) -> Generator[Progress, None, Ranking]:
        """Run the recommended candidate whole, and others that may be better."""
        while ranking.best is not None:
            known = [i for i, one in enumerate(ranking.ranked) if one.known and one.step.exact]
            found = [ranking.ranked[i].found for i in known]
            best = ranking.ranked[ranking.best].found
            wanted = self._checks.next(found, best, [ranking.chances[i] for i in known])
            if wanted is None or (wanted != best and self._is_spent()):
                break
            chance = None if wanted == best else ranking.chances[known[found.index(wanted)]]
            ranking = yield from self._run_whole(wanted, chance, pool, base)
        return ranking

    def _measure_likely(
        self, ranking: Ranking, pool: Sequence[MeshCandidate], base: MeshCandidate
    ) -> Generator[Progress, None, Ranking]:
        """Measure candidates of the pool as long as one that is not known may be the best."""
        while (wanted := self._next(ranking)) is not None:
            ranking = yield from self._measure(wanted, 0.0, pool, base)
        return ranking

    def _next(self, ranking: Ranking) -> MeshCandidate | None:
        """Return the candidate to measure: of those not known, the one that is likeliest to be the best."""
        if self._is_spent() and (ranking.best is not None or self._history.overdrawn(0)):
            return None
        if self._history.is_hopeless(self._space.request.shapes.variant):
            return None
        target = self._space.request.budget.confidence_target
        if ranking.best is not None and 100 * ranking.confidence >= target:
            return None
        open_ = [i for i, one in enumerate(ranking.ranked) if not one.known]
        likely = [i for i in open_ if ranking.chances[i] > 0 or ranking.best is None]
        if not likely:
            return None
        return ranking.ranked[max(likely, key=lambda i: ranking.chances[i])].found

    def _is_spent(self) -> bool:
        return self._history.exhausted(0)

    # -- trials --------------------------------------------------------------------------------------------------

    def _measure(
        self,
        found: MeshCandidate,
        suggest_seconds: float,
        pool: Sequence[MeshCandidate],
        base: MeshCandidate,
    ) -> Generator[Progress, None, Ranking]:
        """Measure what is missing of a candidate; returns the ranking with that."""
        space = self._space
        missing = space.missing(found)
        before = space.step(found)
        plan = self._plan(found, missing)
        started = self._clock()
        measurement = judge(self._executor(plan))
        measured = self._clock()
        self._learn(measurement)
        ranking = self._ranker.rank(pool)
        after = space.step(found)
        complete = measurement.outcome is Outcome.OK
        trial = Trial(
            number=plan.number,
            kind=TrialKind.COMPONENTS,
            measurement=measurement,
            predicted_peak_bytes=before.memory.total,
            measured_peak_bytes=after.memory.total if complete else None,
            predicted_tokens_per_second=before.tokens_per_second,
            tokens_per_second=after.tokens_per_second if complete else None,
            suggest_seconds=suggest_seconds + self._clock() - measured,
            seconds=measured - started,
        )
        self._history.add(trial)
        yield self._progress(trial, [blocks_event(trial, found, len(missing))], ranking, base)
        return ranking

    def _run_whole(
        self, found: MeshCandidate, chance: float | None, pool: Sequence[MeshCandidate], base: MeshCandidate
    ) -> Generator[Progress, None, Ranking]:
        """Run a whole model; returns the ranking with what it says."""
        space = self._space
        run = self._checks.run_of(found, space.step(found, simulate=True))
        composed = space.step(found, simulate=True, run=run)
        plan = self._plan(found, (), run)
        started = self._clock()
        measurement = judge(self._executor(plan))
        seconds = self._clock() - started
        trial = Trial(
            number=plan.number,
            kind=plan.kind,
            measurement=measurement,
            predicted_peak_bytes=composed.memory.total,
            predicted_tokens_per_second=composed.tokens_per_second,
            seconds=seconds,
            mesh_run=run,
        )
        self._checks.learn((trial,))
        check = self._checks.of(found)
        if check is not None:
            figures = {
                "tokens_per_second": check.tokens_per_second,
                "measured_peak_bytes": check.measurement.peak_bytes,
            }
            trial = trial.model_copy(update=figures)
        self._history.add(trial)
        ranking = self._ranker.rank(pool)
        event = whole_model_event(trial, check, chance, mesh=found.mesh.describe())
        yield self._progress(trial, [event], ranking, base)
        return ranking

    def _measure_exchanges(self, wanted: Sequence[Component]) -> Progress:
        """Measure what the devices exchange; what fails keeps its assumed rate."""
        plan = self._plan(min(self._space.candidates, key=plainness), tuple(wanted))
        started = self._clock()
        measurement = judge(self._executor(plan))
        self._learn(measurement)
        trial = Trial(number=plan.number, kind=plan.kind, measurement=measurement, seconds=self._clock() - started)
        self._history.add(trial)
        return Progress(events=(exchange_event(trial, len(wanted)),), trial=trial)

    def _plan(self, found: MeshCandidate, components: tuple[Component, ...], run: MeshRun | None = None) -> TrialPlan:
        request, kind = self._space.request, TrialKind.COMPONENTS if run is None else TrialKind.WHOLE_MODEL
        return TrialPlan(
            number=self._history.next_number,
            kind=kind,
            model=request.shapes,
            candidate=found.candidate,
            components=components,
            timeout_seconds=timeout_seconds(kind, request),
            num_processes=request.num_devices if request.devices.is_mesh else 1,
            mesh_run=run,
        )

    def _progress(self, trial: Trial, events: list[EventDraft], ranking: Ranking, base: MeshCandidate) -> Progress:
        recommended = self._recommend(ranking, base)
        if recommended is not None:
            event = recommendation_event(recommended)
            if render_message(event) != self._last_message:
                self._last_message = render_message(event)
                events.append(event)
        return Progress(events=tuple(events), trial=trial, recommendation=recommended)

    def _learn(self, measurement: Measurement) -> None:
        self._space.learn(measurement.components)
        for each in measurement.components:
            if each.contamination is not None:
                self._contaminated[each.component] = self._contaminated.get(each.component, 0) + 1
                if self._contaminated[each.component] >= CONTAMINATED_ATTEMPTS:
                    self._space.failed[each.component] = each.contamination
        if measurement.outcome not in {Outcome.OK, Outcome.CONTAMINATED} and measurement.failed_component is not None:
            reason = f"{measurement.outcome}: {measurement.reason or 'no reason given'}"
            self._space.failed[measurement.failed_component] = reason

    # -- answer --------------------------------------------------------------------------------------------------

    def _recommend(self, ranking: Ranking, base: MeshCandidate) -> Recommendation | None:
        if ranking.best is None:
            if self._space.failed:
                failure = next(iter(self._space.failed.values()))
                self.reason = f"no mesh could be measured whole; a block failed with {failure}"
            return None
        return recommend_plan(
            self._space, self._report, ranking.ranked, ranking.best, base, ranking.confidence, self._checks
        )
