"""What an answer says of the expert modes that were not recommended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bexp.explorer.cost_model.mesh_layers import MeshCandidate
from bexp.explorer.records.plan import MeshAlternative, PlainMesh
from bexp.explorer.search.mesh_knowledge import MeshKnowledge, RankedCandidate
from bexp.explorer.spec.expert_modes import ExpertMode


def compare_expert_modes(
    space: MeshKnowledge, ranked: Sequence[RankedCandidate], best: RankedCandidate
) -> tuple[MeshAlternative, ...]:
    """Return the best candidate of each other mode on the mesh of `best`, and the best whose experts are not spread.

    If the experts of `best` itself are not spread, the best ranked mesh of each mode is named. Only what fits is named.
    The result is empty if one mode is explored.
    """
    own = best.found.mesh
    if len(space.request.parallelism.expert_modes) == 1:
        return ()
    if own.expert == 1:
        spread = {one.found.mesh.expert_mode: one for one in reversed(ranked) if one.found.mesh.expert > 1}
        return tuple(spread[mode].compared_with(best) for mode in ExpertMode if mode in spread)
    same = [one for one in space.candidates if one.mesh.in_plain_mode == own.in_plain_mode and space.is_open(one)]
    found = [
        _fastest(space, [one for one in same if one.mesh.expert_mode is mode])
        for mode in ExpertMode
        if mode is not own.expert_mode
    ]
    found.append(next((one for one in ranked if one.found.mesh.expert == 1), None))
    return tuple(one.compared_with(best) for one in found if one is not None)


def best_plain_mesh(space: MeshKnowledge, ranked: Sequence[RankedCandidate], best: RankedCandidate) -> PlainMesh | None:
    """Return the best candidate in plain mode; that of the same mesh if none is ranked, whether it fits or not."""
    if best.found.mesh.expert_mode is ExpertMode.PLAIN:
        return None
    found = next((one for one in ranked if one.found.mesh.expert_mode is ExpertMode.PLAIN), None)
    if found is None:
        found = _step_of(space, MeshCandidate(best.found.mesh.in_plain_mode, best.found.candidate))
    alternative = found.compared_with(best).model_copy(update={"candidate": found.found.told})
    return PlainMesh(
        **dict(alternative),
        layers_per_stage=found.step.layers,
        num_micro_batches=found.step.num_micro_batches,
        fits=space.required_bytes(found.step) <= space.limit_bytes,
    )


def _fastest(space: MeshKnowledge, candidates: Iterable[MeshCandidate]) -> RankedCandidate | None:
    steps = [(one, space.step(one)) for one in candidates]
    fits = [(one, step) for one, step in steps if space.required_bytes(step) <= space.limit_bytes]
    if not fits:
        return None
    return _step_of(space, max(fits, key=lambda pair: pair[1].tokens_per_second)[0])


def _step_of(space: MeshKnowledge, found: MeshCandidate) -> RankedCandidate:
    return space.ranked(found, simulate=True)
