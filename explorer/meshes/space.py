"""The meshes of several devices, and how each device runs its share.

The space is searched in stages. Formulas rank the meshes, then the candidates of the best meshes, and those that remain
are measured block by block, the most promising first. Meshes share most of their blocks. What devices exchange is
measured first, and the best candidates run as whole models in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.meshes.check import MeshChecks
from bexp.explorer.meshes.knowledge import MeshKnowledge, RankedCandidate
from bexp.explorer.meshes.layers import MeshCandidate
from bexp.explorer.meshes.mesh import MeshRun
from bexp.explorer.meshes.posterior import sample_throughput
from bexp.explorer.meshes.relaxations import explain_no_mesh_fits, find_mesh_relaxations
from bexp.explorer.meshes.report import recommend_mesh
from bexp.explorer.meshes.step import MeshStep
from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.records.event import EventCode, EventDraft
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation, Relaxation
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask, timeout_seconds
from bexp.explorer.search.confidence import confidences
from bexp.explorer.search.event_messages import whole_model_event
from bexp.explorer.search.loop import ProgressLog, VariantContext
from bexp.explorer.search.search_space import NextCheck, SearchSpace, StepFigures
from bexp.explorer.search.suggestion import Suggestion

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


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates of the pool that may fit, the fastest first, and how sure that is."""

    ranked: tuple[RankedCandidate, ...]
    best: int | None
    confidence: float
    chances: tuple[float, ...]


class MeshRanker:
    """Ranks the candidates of a space by its formulas, its measured blocks, and the whole models that ran."""

    def __init__(self, space: MeshKnowledge, checks: MeshChecks) -> None:
        self._space = space
        self._checks = checks
        self.smallest = 0
        """The fewest bytes that a candidate needs of a device, as of the last screening."""

    def screen(self) -> list[MeshCandidate]:
        """Return the candidates that formulas rank first, and the plainest, of those that may fit."""
        points: Sequence[MeshCandidate] = self._space.candidates
        if len(points) > MOST_SCREENED:
            points = self._of_best_meshes(points)
        ranked = self._rank_by_formulas(points)
        plainest = min((each for each, _ in ranked), key=plainness, default=None)
        pool: list[MeshCandidate] = []
        alike: Counter[tuple[object, ...]] = Counter()
        for each, _ in ranked:
            family = (each.mesh.block_key, each.mesh.pipeline, each.candidate)
            alike[family] += 1
            if len(pool) < POOL and alike[family] <= MOST_ALIKE:
                pool.append(each)
        return pool if plainest is None or plainest in pool else [*pool, plainest]

    def _of_best_meshes(self, points: Sequence[MeshCandidate]) -> Sequence[MeshCandidate]:
        """Return the candidates of the meshes whose smallest micro-batches are fastest."""
        sizes: dict[tuple[object, ...], list[int]] = {}
        for each in points:
            known = sizes.setdefault(each.mesh.family, [])
            if each.candidate.micro_batch_size not in known and len(known) < FIRST_SIZES:
                known.append(each.candidate.micro_batch_size)
        few = [each for each in points if each.candidate.micro_batch_size in sizes[each.mesh.family]]
        ranked = self._rank_by_formulas(few)
        meshes = set(list(dict.fromkeys(each.mesh.family for each, _ in ranked))[:BEST_MESHES])
        return [each for each in points if each.mesh.family in meshes]

    def _rank_by_formulas(self, points: Sequence[MeshCandidate]) -> list[tuple[MeshCandidate, MeshStep]]:
        steps = [(each, self._space.step(each)) for each in points]
        required = [self._least_bytes(each, step) for each, step in steps]
        self.smallest = min(required, default=0)
        fits = [pair for pair, size in zip(steps, required, strict=True) if size <= self._space.limit_bytes]
        return sorted(fits, key=lambda pair: -pair[1].tokens_per_second)

    def _least_bytes(self, point: MeshCandidate, step: MeshStep) -> int:
        """Return the least bytes that a candidate needs: all of them if its blocks are measured."""
        required = self._space.required_bytes(step)
        share = self._space.spared_share(point)
        return required - round(share * (step.memory.activations + step.memory.transient))

    def rank(self, pool: Sequence[MeshCandidate]) -> Ranking:
        """Rank the pool by what is known now; the pipelines of the fastest are simulated."""
        space = self._space
        refuted = self._checks.refuted
        ranked = [space.ranked(each) for each in pool if space.is_open(each) and each not in refuted]
        while True:
            ranked = [one for one in ranked if self._least_bytes(one.point, one.step) <= space.limit_bytes]
            ranked.sort(key=lambda one: -one.tokens_per_second)
            unsure = [i for i, one in enumerate(ranked[:SIMULATED]) if not one.step.exact]
            if not unsure:
                break
            for i in unsure:
                ranked[i] = space.ranked(ranked[i].point, simulate=True)
        best = next((i for i, one in enumerate(ranked) if one.known and one.step.exact), None)
        if not ranked:
            return Ranking((), None, 0.0, ())
        factors = [one.expected for one in ranked]
        samples = sample_throughput([one.step for one in ranked], space.error, space.request.seed, factors)
        chances = np.bincount(samples.argmax(axis=1), minlength=len(ranked)) / len(samples)
        confidence = 0.0
        if best is not None:
            confidence = float(confidences(samples[:, [best]], samples, space.request.tolerance)[0])
        return Ranking(tuple(ranked), best, confidence, tuple(chances.tolist()))


def plainness(point: MeshCandidate) -> tuple[int, ...]:
    """Order candidates for the base: least parallelism, least sharding, no recomputation, the smallest micro-batch."""
    mesh, candidate = point.mesh, point.candidate
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


SCREENINGS = 3
"""How often the whole space is ranked anew, each time with what has been measured until then."""


class MeshSpace(SearchSpace):
    """The meshes of the requested devices. A row is that of `MeshKnowledge.candidates`.

    A suggestion is not split, because the next one follows from all of it. Answers need no comparisons of their own.

    Raises EmptySpaceError if no back end that the request names can be used here.
    """

    def __init__(self, context: VariantContext, log: ProgressLog) -> None:
        self._context = context
        self._request = context.request
        self._history = context.history
        self._log = log
        self._space = MeshKnowledge(context.request, context.report)
        self._rows = {point: row for row, point in enumerate(self._space.candidates)}
        for trial in context.trials:
            self._learn(trial.measurement)
        self._checks = MeshChecks(self._space)
        self._ranker = MeshRanker(self._space, self._checks)
        self._checks.learn(context.trials)
        self._space.expected = self._checks.expected
        self._pool: Sequence[MeshCandidate] = ()
        self._base: MeshCandidate | None = None
        self._ranking = Ranking((), None, 0.0, ())
        self._num_screenings = 0
        self._num_screened = -1
        """How many components were measured when the space was last ranked; -1 before the first suggestion."""
        self._in_flight: set[int] = set()

    def prepare(self) -> Iterator[Suggestion]:
        """Yield the exchanges of the devices, then the base: the plainest candidate."""
        space, is_resumed = self._space, bool(self._context.trials)
        transfers = tuple(c for c in space.transfers if c not in space.measured)
        if transfers and space.candidates:
            plainest = min(space.candidates, key=plainness)
            yield Suggestion(self._rows[plainest], transfers, reason="what devices exchange")
        self._pool = self._ranker.screen()
        self._base = min(self._pool, key=plainness, default=None)
        if not is_resumed:
            self._log.add(*space_events(space, len(self._pool), self._base))
            self._log.describe_space(space.summarize())
        if self._base is None:
            return
        self._ranking = self._ranker.rank(self._pool)
        if space.missing(self._base) and space.is_open(self._base):
            yield self._complete(self._base, "a base")

    def suggest(self) -> Suggestion | None:
        """Return the likeliest candidate to be the best of those not known; the space is ranked anew in between."""
        if self._in_flight or self._base is None:
            return None
        if self._num_screened < 0:
            self._num_screened = len(self._space.measured)
        while self._num_screenings < SCREENINGS:
            likeliest = self._likeliest()
            if likeliest is not None:
                return self._complete(likeliest, "likely to be the best")
            if len(self._space.measured) == self._num_screened:
                return None
            self._pool = list(dict.fromkeys([*self._ranker.screen(), self._base]))  # with what is known now
            self._ranking = self._ranker.rank(self._pool)
            self._num_screenings += 1
            self._num_screened = len(self._space.measured)
        return None

    def _likeliest(self) -> MeshCandidate | None:
        """Return the likeliest to be the best of those not known; None if one that is known is likely enough."""
        ranking, target = self._ranking, self._request.budget.confidence_target
        if ranking.best is not None and 100 * ranking.confidence >= target:
            return None
        open_ = [i for i, one in enumerate(ranking.ranked) if not one.known]
        likely = [i for i in open_ if ranking.chances[i] > 0 or ranking.best is None]
        if not likely:
            return None
        return ranking.ranked[max(likely, key=lambda i: ranking.chances[i])].point

    def _complete(self, point: MeshCandidate, reason: str) -> Suggestion:
        return Suggestion(self._rows[point], self._space.missing(point), reason=reason)

    @property
    def is_answered(self) -> bool:
        """Whether all blocks of a candidate are measured."""
        return self._ranking.best is not None

    @property
    def ends_search(self) -> bool:
        """Whether a whole model was run."""
        return bool(self._history.whole_models(self._context.variant))

    def begin(self, number: int, suggestion: Suggestion) -> tuple[TrialTask, StepFigures]:
        """Begin a trial of the blocks of a candidate, or of transfers, which belong to no candidate."""
        self._in_flight.add(number)
        task = self._task(number, suggestion.row, suggestion.components)
        return task.model_copy(update={"again": suggestion.again}), self._figures(suggestion)

    def learn(
        self, number: int, suggestion: Suggestion, measurement: Measurement, awaited: Collection[Component]
    ) -> tuple[Measurement, StepFigures]:
        """Rank the candidates anew with what was measured."""
        self._in_flight.discard(number)
        self._learn(measurement)
        self._ranking = self._ranker.rank(self._pool)
        return measurement, self._figures(suggestion) if measurement.outcome is Outcome.OK else StepFigures()

    def _learn(self, measurement: Measurement) -> None:
        self._space.learn(measurement.components)
        self._space.learn_failure(measurement)

    def times_contaminated(self, component: Component) -> int:
        """Return how many trials have measured a component on a shared or throttled device."""
        return self._space.contaminated[component]

    def is_measured(self, component: Component) -> bool:
        """Return whether a component was measured well."""
        return component in self._space.measured

    def row_of(self, trial: Trial) -> int | None:
        """Return None: a stored trial does not name its mesh, and what is missing is suggested again."""
        return None

    def trial_events(self, suggestion: Suggestion, trial: Trial) -> list[EventDraft]:
        """Return the events of a trial of blocks, or of transfers."""
        number = len(suggestion.components)
        if _is_transfer(suggestion):
            return [transfers_event(trial, number)]
        return [blocks_event(trial, self._space.candidates[suggestion.row], number)]

    def _task(self, number: int, row: int, components: tuple[Component, ...], run: MeshRun | None = None) -> TrialTask:
        request, kind = self._request, TrialKind.COMPONENTS if run is None else TrialKind.WHOLE_MODEL
        return TrialTask(
            number=number,
            kind=kind,
            model=request.shapes,
            candidate=self._space.candidates[row].candidate,
            components=components,
            timeout_seconds=timeout_seconds(kind, request),
            num_processes=request.num_devices,
            shared_run=run,
        )

    def _figures(self, suggestion: Suggestion) -> StepFigures:
        if _is_transfer(suggestion):
            return StepFigures()
        step = self._space.step(self._space.candidates[suggestion.row])
        return StepFigures(step.memory.total, step.tokens_per_second)

    def next_whole_model(self) -> NextCheck | None:
        """Return the recommended candidate, then others that may be better."""
        ranking = self._ranking
        if ranking.best is None:
            return None
        known = [i for i, one in enumerate(ranking.ranked) if one.known and one.step.exact]
        points = [ranking.ranked[i].point for i in known]
        best = ranking.ranked[ranking.best].point
        wanted = self._checks.next(points, best, [ranking.chances[i] for i in known])
        if wanted is None or (wanted != best and self._history.exhausted(self._context.index)):
            return None
        chance = None if wanted == best else ranking.chances[known[points.index(wanted)]]
        return NextCheck(self._rows[wanted], chance)

    def begin_whole_model(self, number: int, check: NextCheck) -> tuple[TrialTask, StepFigures]:
        """Return the whole model of a candidate on its mesh, and its composed step."""
        point = self._space.candidates[check.row]
        run = self._checks.run_of(point, self._space.step(point, simulate=True))
        composed = self._space.step(point, simulate=True, run=run)
        return self._task(number, check.row, (), run), StepFigures(composed.memory.total, composed.tokens_per_second)

    def learn_whole_model(self, check: NextCheck, trial: Trial) -> tuple[Trial, list[EventDraft]]:
        """Rank the candidates anew with the figures of the whole model."""
        point = self._space.candidates[check.row]
        self._checks.learn((trial,))
        ran = self._checks.of(point)
        if ran is not None:
            figures = {"tokens_per_second": ran.tokens_per_second, "measured_peak_bytes": ran.measurement.peak_bytes}
            trial = trial.model_copy(update=figures)
        self._ranking = self._ranker.rank(self._pool)
        return trial, [whole_model_event(trial, ran, check.probability_better, mesh=point.mesh)]

    def recommend(self, *, final: bool = False) -> Recommendation | None:
        """Return the best of the candidates whose blocks are all measured; None if there is none."""
        ranking = self._ranking
        if ranking.best is None or self._base is None:
            return None
        return recommend_mesh(
            self._space,
            self._context.report,
            ranking.ranked,
            ranking.best,
            self._base,
            ranking.confidence,
            self._checks,
        )

    def explain(self) -> tuple[str, tuple[Relaxation, ...]]:
        """Return the reason: memory is short, a block failed, or the budget was too small."""
        if self._base is None:
            remedies = find_mesh_relaxations(self._request, self._context.report)
            return explain_no_mesh_fits(self._ranker.smallest, self._space.limit_bytes, remedies), remedies
        if self._space.failed:
            failure = next(iter(self._space.failed.values()))
            return f"no mesh could be measured whole; a block failed with {failure}", ()
        return "the budget ended before a mesh was measured: raise max_seconds or max_trials", ()


def _is_transfer(suggestion: Suggestion) -> bool:
    return suggestion.components[0].exchange is not None


GIGA = 1e9


def space_events(space: MeshKnowledge, number: int, base: MeshCandidate | None) -> list[EventDraft]:
    """Return the events of the space of meshes: how many candidates are considered at first, and its base."""
    request = space.request
    summary = space.summarize()
    events = [
        EventDraft(
            code=EventCode.SPACE,
            message=(
                f"{request.shapes.name}: {count_parameters(request.shapes):,} parameters on {request.num_devices:,} "
                f"devices, {summary['num_meshes']:,} meshes, {summary['num_candidates']:,} candidates; the best "
                f"{number} by formulas that may fit in {bytes_text(space.limit_bytes)} are measured by their blocks"
            ),
            data={**summary, "memory_limit_bytes": space.limit_bytes},
        )
    ]
    if base is not None:
        data = {"candidate": base.candidate.model_dump(mode="json"), "mesh": base.mesh.model_dump(mode="json")}
        events.append(EventDraft(code=EventCode.BASE, message=f"Base (1.00x): {base.describe()}", data=data))
    return events


def transfers_event(trial: Trial, number: int) -> EventDraft:
    """Return the event of a trial of `number` transfers: the highest rate of each."""
    measurement = trial.measurement
    data = {"trial": trial.number, "outcome": measurement.outcome.value}
    if measurement.outcome is not Outcome.OK:
        reason = measurement.reason or "no reason given"
        message = f"What devices exchange could not be measured, and is assumed: {measurement.outcome}: {reason}"
        return EventDraft(code=EventCode.WARNING, message=message, data={**data, "reason": reason})
    timed = [each for each in measurement.components if each.component.exchange is not None and each.device_seconds]
    fastest: dict[str, float] = {}
    for each in timed:
        asked = each.component.exchange
        if asked is not None:
            name = f"{asked.operation} of {asked.size}"
            fastest[name] = max(fastest.get(name, 0.0), asked.num_bytes / each.device_seconds / GIGA)
    rates = [f"{name} {rate:.1f}" for name, rate in fastest.items()]
    message = (
        f"Trial {trial.number}: what devices exchange, {number} measurements in {trial.seconds:.1f} s; "
        f"GB/s at most: {', '.join(rates)}"
    )
    return EventDraft(code=EventCode.TRIAL, message=message, data=data)


def blocks_event(trial: Trial, point: MeshCandidate, number: int) -> EventDraft:
    """Return the event of a trial that measured `number` blocks of a candidate."""
    measurement = trial.measurement
    data = {
        "trial": trial.number,
        "candidate": trial.candidate.model_dump(mode="json"),
        "mesh": point.mesh.model_dump(mode="json"),
        "outcome": measurement.outcome.value,
        "tokens_per_second": trial.tokens_per_second,
        "predicted_peak_bytes": trial.predicted_peak_bytes,
        "measured_peak_bytes": trial.measured_peak_bytes,
    }
    if measurement.outcome is Outcome.OK:
        measured = f"{number} new {'component' if number == 1 else 'components'}"
        figures = trial.describe_figures(" of each device")
        message = f"Trial {trial.number}: {point.describe()}: {figures} ({measured} in {trial.seconds:.1f} s)"
        return EventDraft(code=EventCode.TRIAL, message=message, data=data)
    code = EventCode.WARNING if measurement.outcome is Outcome.CONTAMINATED else EventCode.INFEASIBLE
    message = f"{point.describe()}: {measurement.outcome}: {measurement.reason or 'no reason given'}"
    return EventDraft(code=code, message=message, data={**data, "reason": measurement.reason})
