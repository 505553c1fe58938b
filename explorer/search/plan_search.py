"""The search of a plan: which mesh, and how each device runs its share, for a machine that is described.

The space is searched in stages. Formulas rank the meshes, then the candidates of the best meshes, and those that remain
are measured block by block, the most promising first. Meshes share most of their blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from explorer.cost_model.components import Component
from explorer.cost_model.mesh_layers import MeshCandidate
from explorer.cost_model.mesh_step import MeshStep
from explorer.cost_model.parameters import count_parameters
from explorer.cost_model.search_space import EmptySpaceError
from explorer.cost_model.step import GIB
from explorer.records.event import EventCode, EventDraft, Progress, recommendation_event, render_message
from explorer.records.measurement import CONTAMINATED_ATTEMPTS, Measurement, Outcome, judge
from explorer.records.recommendation import Answer, Recommendation, Relaxation, VariantAnswer
from explorer.records.trial import Measure, Trial, TrialKind, TrialPlan
from explorer.search.event_messages import end_event, size_text
from explorer.search.history import TrialHistory
from explorer.search.plan_posterior import confidence_in, sample_throughput
from explorer.search.plan_relaxations import explain_no_mesh_fits, find_plan_relaxations
from explorer.search.plan_report import recommend_plan
from explorer.search.plan_space import PlanSpace, RankedCandidate
from explorer.search.trial_executor import executor_of
from explorer.spec.expert_modes import ExpertMode
from explorer.spec.hardware import DeviceReport
from explorer.spec.request import ExplorationRequest

MOST_SCREENED = 4000
"""The most candidates that are ranked in one stage; of larger spaces, meshes are ranked first."""
BEST_MESHES = 96
FIRST_SIZES = 2
"""Micro-batch sizes that a mesh is first ranked by, the smallest ones."""
POOL = 128
"""Candidates that are ranked anew after each trial."""
SIMULATED = 16
"""Candidates whose pipelines are simulated after each trial; those of the others are estimated."""
MOST_ALIKE = 3
"""Candidates of the pool that differ only in schedule, virtual stages and sharding."""
SCREENINGS = 3
"""How often the whole space is ranked, each time with what has been measured until then."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates of the pool that may fit, the fastest first, and how sure that is."""

    ranked: tuple[RankedCandidate, ...]
    best: int | None
    confidence: float
    chances: tuple[float, ...]


def explore_plan(
    request: ExplorationRequest,
    report: DeviceReport,
    measure: Measure,
    *,
    history: Sequence[Trial],
    clock: Callable[[], float],
) -> Iterator[Progress]:
    """Run a plan and yield the results step by step, as `explorer.search.explore.explore` does."""
    answer = VariantAnswer(
        num_query_groups=request.model.query_groups,
        num_parameters=count_parameters(request.model),
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
        self._last_message = ""
        self._smallest = 0
        self.remedies: tuple[Relaxation, ...] = ()
        self.reason = "the budget ended before a mesh was measured: raise max_seconds or max_trials"

    @property
    def completed_target(self) -> int | None:
        """The confidence target, if neither the budget nor failing trials have ended the search."""
        is_cut_short = self._is_spent() or self._history.is_hopeless(self._space.request.model.query_groups)
        return None if is_cut_short else self._space.request.budget.confidence_target

    def run(self) -> Generator[Progress, None, Recommendation | None]:
        """Measure until the confidence target or the budget is reached; returns the recommendation."""
        started = self._clock()
        pool = self._screen()
        base = min(pool, key=_plainness, default=None)
        if not self._is_resumed:
            yield self._begin(len(pool), base)
        if base is None:
            self.remedies = find_plan_relaxations(self._space.request, self._report)
            self.reason = explain_no_mesh_fits(self._smallest, self._space.limit_bytes, self.remedies)
            return None
        ranking = self._rank(pool)
        if self._is_resumed and (known := self._recommend(ranking, base)) is not None:
            self._last_message = render_message(recommendation_event(known))
        if self._space.missing(base) and self._space.is_open(base):
            ranking = yield from self._measure(base, self._clock() - started, pool, base)
        for _ in range(SCREENINGS):
            before = len(self._space.measured)
            ranking = yield from self._measure_likely(ranking, pool, base)
            if self._is_spent() or len(self._space.measured) == before:
                break
            pool = [*self._screen(), base]  # with what is known now
            ranking = self._rank(pool)
        return self._recommend(ranking, base)

    def _measure_likely(
        self, ranking: Ranking, pool: Sequence[MeshCandidate], base: MeshCandidate
    ) -> Generator[Progress, None, Ranking]:
        """Measure candidates of the pool as long as one that is not known may be the best."""
        while (wanted := self._next(ranking)) is not None:
            ranking = yield from self._measure(wanted, 0.0, pool, base)
        return ranking

    # -- stages --------------------------------------------------------------------------------------------------

    def _screen(self) -> list[MeshCandidate]:
        """Return the candidates that formulas rank first, and the plainest, of those that may fit."""
        found: Sequence[MeshCandidate] = self._space.candidates
        if len(found) > MOST_SCREENED:
            found = self._of_best_meshes(found)
        ranked = self._rank_by_formulas(found)
        plainest = min((each for each, _ in ranked), key=_plainness, default=None)
        pool: list[MeshCandidate] = []
        alike: Counter[tuple[object, ...]] = Counter()
        for each, _ in ranked:
            family = (each.mesh.block_key, each.mesh.pipeline, each.candidate)
            alike[family] += 1
            if len(pool) < POOL and alike[family] <= MOST_ALIKE:
                pool.append(each)
        return pool if plainest is None or plainest in pool else [*pool, plainest]

    def _of_best_meshes(self, found: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
        """Return the candidates of the meshes whose smallest micro-batches are fastest."""
        sizes: dict[tuple[object, ...], list[int]] = {}
        for each in found:
            known = sizes.setdefault(each.mesh.family, [])
            if each.candidate.micro_batch_size not in known and len(known) < FIRST_SIZES:
                known.append(each.candidate.micro_batch_size)
        few = [each for each in found if each.candidate.micro_batch_size in sizes[each.mesh.family]]
        ranked = self._rank_by_formulas(few)
        meshes = set(list(dict.fromkeys(each.mesh.family for each, _ in ranked))[:BEST_MESHES])
        return [each for each in found if each.mesh.family in meshes]

    def _rank_by_formulas(self, found: Sequence[MeshCandidate]) -> list[tuple[MeshCandidate, MeshStep]]:
        steps = [(each, self._space.step(each)) for each in found]
        required = [self._least_bytes(each, step) for each, step in steps]
        self._smallest = min(required, default=0)
        fits = [pair for pair, size in zip(steps, required, strict=True) if size <= self._space.limit_bytes]
        return sorted(fits, key=lambda pair: -pair[1].tokens_per_second)

    def _least_bytes(self, found: MeshCandidate, step: MeshStep) -> int:
        """Return what a candidate needs at least: all of it if its blocks are measured."""
        required = self._space.required_bytes(step)
        share = self._space.spared_share(found)
        return required - round(share * (step.memory.activations + step.memory.transient))

    def _rank(self, pool: Sequence[MeshCandidate]) -> Ranking:
        """Rank the pool by what is known now; the pipelines of the fastest are simulated."""
        space = self._space
        estimated = [(each, space.step(each)) for each in pool if space.is_open(each)]
        ranked = [RankedCandidate(each, step, not space.missing(each)) for each, step in estimated]
        while True:
            ranked = [one for one in ranked if self._least_bytes(one.found, one.step) <= space.limit_bytes]
            ranked.sort(key=lambda one: -one.step.tokens_per_second)
            unsure = [i for i, one in enumerate(ranked[:SIMULATED]) if not one.step.exact]
            if not unsure:
                break
            for i in unsure:
                one = ranked[i]
                ranked[i] = RankedCandidate(one.found, space.step(one.found, simulate=True), one.known)
        best = next((i for i, one in enumerate(ranked) if one.known and one.step.exact), None)
        if not ranked:
            return Ranking((), None, 0.0, ())
        samples = sample_throughput([one.step for one in ranked], space.error, space.request.seed)
        chances = np.bincount(samples.argmax(axis=1), minlength=len(ranked)) / len(samples)
        confidence = 0.0 if best is None else confidence_in(best, samples, space.request.tolerance)
        return Ranking(tuple(ranked), best, confidence, tuple(chances.tolist()))

    def _next(self, ranking: Ranking) -> MeshCandidate | None:
        """Return the candidate to measure: of those not known, the one that is likeliest to be the best."""
        if self._is_spent() and (ranking.best is not None or self._history.overdrawn(0)):
            return None
        if self._history.is_hopeless(self._space.request.model.query_groups):
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
        plan = TrialPlan(
            number=self._history.next_number,
            kind=TrialKind.COMPONENTS,
            model=space.request.model,
            candidate=found.candidate,
            components=missing,
            timeout_seconds=space.request.budget.trial_timeout_seconds,
        )
        started = self._clock()
        measurement = judge(self._executor(plan))
        measured = self._clock()
        self._learn(measurement)
        ranking = self._rank(pool)
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
        events = [_trial_event(trial, found, len(missing))]
        recommended = self._recommend(ranking, base)
        if recommended is not None:
            event = recommendation_event(recommended)
            if render_message(event) != self._last_message:
                self._last_message = render_message(event)
                events.append(event)
        yield Progress(events=tuple(events), trial=trial, recommendation=recommended)
        return ranking

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
        return recommend_plan(self._space, self._report, ranking.ranked, ranking.best, base, ranking.confidence)

    def _begin(self, number: int, base: MeshCandidate | None) -> Progress:
        request, limit = self._space.request, self._space.limit_bytes / GIB
        summary = self._space.summarize()
        space = EventDraft(
            code=EventCode.SPACE,
            message=(
                f"{request.model.name}: {count_parameters(request.model):,} parameters on {request.num_devices:,} "
                f"described devices, {summary['num_meshes']} meshes, {summary['num_candidates']} candidates; the best "
                f"{number} by formulas that may fit in {limit:.2f} GiB are measured by their blocks"
            ),
            data={**summary, "memory_limit_bytes": self._space.limit_bytes},
        )
        if base is None:
            return Progress(events=(space,), space=summary)
        named = EventDraft(
            code=EventCode.BASE,
            message=f"Base (1.00x): {base.describe()}",
            data={"candidate": base.candidate.model_dump(mode="json"), "mesh": base.mesh.model_dump(mode="json")},
        )
        return Progress(events=(space, named), space=summary)


def _plainness(found: MeshCandidate) -> tuple[int, ...]:
    """Order candidates for the base: least parallelism, least sharding, no recomputation, the smallest micro-batch."""
    mesh, candidate = found.mesh, found.candidate
    parallel = mesh.tensor * mesh.pipeline * mesh.expert
    mode = list(ExpertMode).index(mesh.expert_mode)
    return (
        parallel,
        mode,
        mesh.sharding.level,
        mesh.virtual_stages,
        candidate.recompute.rank[0],
        candidate.micro_batch_size,
    )


def _trial_event(trial: Trial, found: MeshCandidate, number: int) -> EventDraft:
    measurement = trial.measurement
    data = {
        "trial": trial.number,
        "candidate": trial.candidate.model_dump(mode="json"),
        "mesh": found.mesh.model_dump(mode="json"),
        "outcome": measurement.outcome.value,
        "tokens_per_second": trial.tokens_per_second,
        "predicted_peak_bytes": trial.predicted_peak_bytes,
        "measured_peak_bytes": trial.measured_peak_bytes,
    }
    if measurement.outcome is Outcome.OK:
        peak = size_text(trial.measured_peak_bytes or 0)
        message = (
            f"Trial {trial.number}: {found.describe()}: {trial.tokens_per_second:.0f} tokens/s of each device, "
            f"peak {peak} ({number} new {'component' if number == 1 else 'components'} in {trial.seconds:.1f} s)"
        )
        return EventDraft(code=EventCode.TRIAL, message=message, data=data)
    code = EventCode.WARNING if measurement.outcome is Outcome.CONTAMINATED else EventCode.INFEASIBLE
    message = f"{found.describe()}: {measurement.outcome}: {measurement.reason or 'no reason given'}"
    return EventDraft(code=code, message=message, data={**data, "reason": measurement.reason})
