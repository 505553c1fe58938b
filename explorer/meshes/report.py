"""The recommendation of a mesh, made from the ranked candidates."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.meshes.check import MeshChecks
from bexp.explorer.meshes.knowledge import MeshKnowledge, RankedCandidate
from bexp.explorer.meshes.layers import MeshCandidate
from bexp.explorer.meshes.mesh import Mesh, MeshPlan, PipelinePicture, PlainMesh, PlanPart
from bexp.explorer.meshes.pipeline import Pass, PipelineRun, TimedPass
from bexp.explorer.meshes.step import MeshStep, reduces_late
from bexp.explorer.model.routes import dropped_share
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import Alternative, Note, NoteCode, Recommendation, Role, WholeModelCheck
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.confidence import confidence_score

MOST_ALTERNATIVES = 5


def recommend_mesh(
    space: MeshKnowledge,
    report: DeviceReport,
    ranked: Sequence[RankedCandidate],
    best: int,
    base: MeshCandidate,
    confidence: float,
    checks: MeshChecks,
) -> Recommendation:
    """Return everything that is known about the best candidate."""
    request, one = space.request, ranked[best]
    point, step = one.point, one.step
    candidate, plain = (each.sharded for each in (point, base))
    check, tokens_per_second = checks.of(point), one.tokens_per_second
    base_tokens_per_second = space.ranked(base, simulate=True).tokens_per_second
    score = confidence_score(confidence)
    required = space.required_bytes(step, check)
    plan = MeshPlan(
        mesh=point.mesh,
        base_mesh=base.mesh,
        num_micro_batches=step.num_micro_batches,
        tokens_per_second=tokens_per_second * point.mesh.num_devices,
        compute_share=min(1.0, step.compute_share),
        exchange_share=min(1.0, step.exchange_share),
        bubble_share=min(1.0, step.bubble_share),
        layers_per_stage=step.layers,
        fullest_rank=step.fullest_rank,
        parts=_parts(step),
        plain=best_plain_mesh(space, ranked, one),
        picture=None if step.run is None else draw_pipeline(step.run),
    )
    return Recommendation(
        candidate=candidate,
        base=plain,
        tokens_per_second=tokens_per_second,
        performance=tokens_per_second / base_tokens_per_second,
        confidence=score,
        step_seconds=one.expected.factor * step.seconds,
        micro_step_seconds=one.expected.factor * step.micro_step_seconds,
        optimizer_seconds=one.expected.factor * step.optimizer_seconds,
        communication_seconds=one.expected.factor * step.communication_seconds,
        grad_accum_steps=step.num_micro_batches,
        predicted_peak_bytes=space.predicted_step(point).memory.total,
        measured_peak_bytes=step.memory.total,
        required_bytes=required,
        memory_limit_bytes=space.limit_bytes,
        memory=step.memory,
        notes=tuple(
            Note(code=code, text=text)
            for code, text in _notes(space, report, point.mesh, score, step.num_micro_batches, checks, check)
        ),
        alternatives=tuple(
            _compare(space, checks, role, other, one, score if role is Role.DIVIDING else None)
            for role, other in _others(space, ranked, one, checks)
        ),
        headroom=request.headroom,
        composed_tokens_per_second=step.tokens_per_second,
        whole_model=check,
        dropped_share=_dropped_share(space.request, point),
        plan=plan,
    )


def _parts(step: MeshStep) -> tuple[PlanPart, ...]:
    """Return the parts of the step, the largest first."""
    return tuple(
        PlanPart(name="exchange between devices" if part is None else part.key, share=min(1.0, share))
        for part, share in sorted(step.makeup.items(), key=lambda item: -item[1])
        if share > 0
    )


def _dropped_share(request: ExplorationRequest, point: MeshCandidate) -> float | None:
    moe, mesh = request.shapes.moe, point.mesh
    if moe is None or moe.capacity_factor is None:
        return None
    tokens = point.candidate.micro_batch_size * request.shapes.seq_length
    # A device that shares experts routes its part of each sequence.
    own = -(-tokens // mesh.tensor) if mesh.expert > 1 else tokens
    return dropped_share(moe, request.routing, own, request.seed)


def _others(
    space: MeshKnowledge, ranked: Sequence[RankedCandidate], best: RankedCandidate, checks: MeshChecks
) -> Iterable[tuple[Role, RankedCandidate]]:
    """Yield the rows to compare the best with: itself, with a batch that it divides, and the best of other meshes."""
    yield Role.DIVIDING, best
    runner_up = checks.runner_up_of(best.point)
    if runner_up is not None:
        yield Role.RUNNER_UP, space.ranked(runner_up, simulate=True)
    for other in compare_expert_modes(space, ranked, best):
        yield Role.EXPERT_MODE, other
    chosen: dict[Mesh, RankedCandidate] = {}
    for one in ranked:
        if one.point.mesh != best.point.mesh and len(chosen) < MOST_ALTERNATIVES:
            chosen.setdefault(one.point.mesh, one)
    for one in chosen.values():
        yield Role.OTHER_MESH, one


def _compare(
    space: MeshKnowledge, checks: MeshChecks, role: Role, one: RankedCandidate, best: RankedCandidate, score: int | None
) -> Alternative:
    """Return the figures of a candidate, compared with the best; `score` is its confidence, where it has one."""
    tokens_per_second, whole_model = one.compared_with(best), checks.of(one.point)
    return Alternative(
        role=role,
        candidate=one.point.sharded,
        mesh=one.point.mesh,
        confidence=score,
        tokens_per_second=tokens_per_second,
        ratio=best.tokens_per_second / tokens_per_second,
        composed_tokens_per_second=one.step.tokens_per_second,
        predicted=not one.known,
        measured_peak_bytes=one.step.memory.total,
        required_bytes=space.required_bytes(one.step, whole_model),
        grad_accum_steps=one.step.num_micro_batches,
        whole_model=whole_model,
        outcome=None if whole_model is None else Outcome.OK,
    )


def _notes(
    space: MeshKnowledge,
    report: DeviceReport,
    mesh: Mesh,
    score: int,
    number_of_step: int,
    checks: MeshChecks,
    check: WholeModelCheck | None,
) -> Iterable[tuple[NoteCode, str]]:
    number, device = space.request.num_devices, report.hardware.device_name
    refusal = checks.refusal(mesh)
    why = "" if refusal is None else f" ({refusal})"
    checked = f"it was not run whole{why}" if check is None else "it was run whole on them"
    yield NoteCode.MESH, f"blocks and exchanges were measured on {number} x {device}; {checked}"
    ran = number_of_step if check is None else check.measurement.num_micro_batches or number_of_step
    if ran < number_of_step:
        grows = ", and a pipeline's peak grows with them" if mesh.pipeline > 1 else ""
        yield NoteCode.WHOLE_MODEL, f"the whole model ran {ran} of a step's {number_of_step} micro-batches{grows}"
    if mesh.tensor > 1:
        norms = "norms are measured over all tokens; what sequence parallelism spares is taken off at the bandwidth"
        yield NoteCode.MESH, norms
    if mesh.expert > 1:
        block = "the experts' block was measured on the devices that share it, with the exchanges of their tokens"
        yield NoteCode.MESH, block
    if mesh.expert_mode is not ExpertMode.PLAIN:
        yield NoteCode.MESH, "of the trainers only bexp's own kernels have this expert mode"
    if reduces_late(mesh):
        yield NoteCode.MESH, "gradients are reduced after the last micro-batch, when no backward hides it"
    elif mesh.data > 1:
        yield NoteCode.MESH, "the gradients' reduction is hidden behind backward as far as it lasts"
    target = space.request.budget.confidence_target
    if score < target:
        why = "the budget ended, or candidates are nearer to each other than the noise lets tell"
        yield NoteCode.CONFIDENCE, f"the confidence is below {target}: {why}"


WIDTH = 64
"""Characters of a line."""
MOST_LINES = 16
"""Ranks that are drawn; of more, every second, every third and so on is."""
WAITS = "."


def draw_pipeline(run: PipelineRun) -> PipelinePicture:
    """Draw a run from its beginning until the first rank has run as many backward passes as there are ranks.

    A character is what the rank does in the middle of its share of the time: `F` and `B` are the passes of a
    micro-batch, in small letters for every second micro-batch, and `.` is waiting.
    """
    by_rank: defaultdict[int, list[TimedPass]] = defaultdict(list)
    for each in run.passes:
        by_rank[each.rank].append(each)
    ranks = sorted(by_rank)
    first = [each.end for each in by_rank[ranks[0]] if each.action.kind is Pass.BACKWARD]
    seconds = min(run.seconds, sorted(first)[min(len(ranks), len(first)) - 1])
    drawn = ranks[:: -(-len(ranks) // MOST_LINES)]
    lines = tuple(_line(by_rank[rank], seconds) for rank in drawn)
    return PipelinePicture(seconds=seconds, ranks=tuple(drawn), lines=lines)


def _line(passes: list[TimedPass], seconds: float) -> str:
    begins = [each.begin for each in passes]
    return "".join(_character(passes, begins, seconds * (i + 0.5) / WIDTH) for i in range(WIDTH))


def _character(passes: list[TimedPass], begins: list[float], moment: float) -> str:
    index = bisect_right(begins, moment) - 1
    if index < 0 or passes[index].end <= moment:
        return WAITS
    kind, _, micro_batch = passes[index].action
    return kind.value.lower() if micro_batch % 2 else kind.value


def compare_expert_modes(
    space: MeshKnowledge, ranked: Sequence[RankedCandidate], best: RankedCandidate
) -> tuple[RankedCandidate, ...]:
    """Return the best candidate of each other mode on the mesh of `best`, and the best whose experts are not spread.

    If the experts of `best` itself are not spread, the best ranked mesh of each mode is returned. Only candidates that
    fit are returned, and none if one mode is explored.
    """
    own = best.point.mesh
    if len(space.request.parallelism.expert_modes) == 1:
        return ()
    if own.expert == 1:
        spread = {one.point.mesh.expert_mode: one for one in reversed(ranked) if one.point.mesh.expert > 1}
        return tuple(spread[mode] for mode in ExpertMode if mode in spread)
    same = [one for one in space.candidates if one.mesh.in_plain_mode == own.in_plain_mode and space.is_open(one)]
    compared = [
        _fastest(space, [one for one in same if one.mesh.expert_mode is mode])
        for mode in ExpertMode
        if mode is not own.expert_mode
    ]
    compared.append(next((one for one in ranked if one.point.mesh.expert == 1), None))
    return tuple(one for one in compared if one is not None)


def best_plain_mesh(space: MeshKnowledge, ranked: Sequence[RankedCandidate], best: RankedCandidate) -> PlainMesh | None:
    """Return the best candidate in plain mode; that of the same mesh if none is ranked, whether it fits or not."""
    if best.point.mesh.expert_mode is ExpertMode.PLAIN:
        return None
    plain = next((one for one in ranked if one.point.mesh.expert_mode is ExpertMode.PLAIN), None)
    if plain is None:
        in_plain_mode = MeshCandidate(best.point.mesh.in_plain_mode, best.point.candidate)
        plain = space.ranked(in_plain_mode, simulate=True)
    tokens_per_second = plain.compared_with(best)
    return PlainMesh(
        mesh=plain.point.mesh,
        candidate=plain.point.sharded,
        tokens_per_second=tokens_per_second,
        ratio=best.tokens_per_second / tokens_per_second,
        predicted=not plain.known,
        layers_per_stage=plain.step.layers,
        num_micro_batches=plain.step.num_micro_batches,
        fits=space.required_bytes(plain.step) <= space.limit_bytes,
    )


def _fastest(space: MeshKnowledge, candidates: Iterable[MeshCandidate]) -> RankedCandidate | None:
    steps = [(one, space.step(one)) for one in candidates]
    fits = [(one, step) for one, step in steps if space.required_bytes(step) <= space.limit_bytes]
    if not fits:
        return None
    return space.ranked(max(fits, key=lambda pair: pair[1].tokens_per_second)[0], simulate=True)
