"""The part of an answer about a mesh of devices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from bexp.explorer.answers.text import row
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.mesh import Mesh
from bexp.explorer.model.amounts import rate_text, seconds_text
from bexp.explorer.records.plan import MeshPlan
from bexp.explorer.records.recommendation import Alternative, Recommendation, Role

MOST_PARTS = 5


def mesh_text(plan: MeshPlan) -> str:
    """Return the mesh and its number of devices."""
    return f"{plan.mesh.describe()} on {plan.mesh.num_devices:,} devices"


def mesh_rows(plan: MeshPlan) -> Iterable[str]:
    """Yield the mesh, and what its devices' time goes to."""
    mesh = plan.mesh
    yield row("mesh", mesh_text(plan))
    if mesh.pipeline > 1:
        layers = " ".join(_run(count, len(list(same))) for count, same in groupby(plan.layers_per_stage))
        yield row("  layers", f"{layers} per stage; rank {plan.fullest_rank} is the fullest")
    yield row("  all devices", rate_text(plan.tokens_per_second))
    yield row(
        "  time",
        f"{plan.compute_share:.1%} computation, {plan.exchange_share:.1%} exchange, {plan.bubble_share:.1%} bubble",
    )
    for part in plan.parts[:MOST_PARTS]:
        yield row("", f"{part.share:6.1%} {part.name}")


def picture_rows(plan: MeshPlan) -> Iterable[str]:
    """Yield what the ranks of the pipeline do at the beginning of a step, a line each."""
    picture = plan.picture
    if picture is None:
        return
    yield f"  the first {seconds_text(picture.seconds)} of a step, rank by rank:"
    for rank, line in zip(picture.ranks, picture.lines, strict=True):
        yield f"    {rank:4d}  {line}"
    yield "    F forward, B backward, . waits; small letters: every second micro-batch"


def other_mesh_rows(best: Recommendation) -> Iterable[str]:
    """Yield the next best meshes."""
    for other in best.alternatives_of(Role.OTHER_MESH):
        yield row("other mesh", f"{other.ratio:.2f}x over {_on_mesh(other)}")


def expert_mode_rows(best: Recommendation) -> Iterable[str]:
    """Yield by how much the expert mode beats the others, and experts that no devices share."""
    for other in best.alternatives_of(Role.EXPERT_MODE):
        own, mode = (_mode_text(mesh) for mesh in (None if best.plan is None else best.plan.mesh, other.mesh))
        yield row("expert mode", f"{own}: {other.ratio:.2f}x over {mode}, {_on_mesh(other)}")


def _on_mesh(other: Alternative) -> str:
    mesh = "" if other.mesh is None else other.mesh.describe()
    predicted = ", predicted in part" if other.predicted else ""
    return (
        f"{mesh} micro_batch_size={other.candidate.micro_batch_size} recompute={other.candidate.recompute} "
        f"({rate_text(other.tokens_per_second)}{predicted})"
    )


def base_text(plan: MeshPlan, base: Candidate) -> str:
    """Return the base with its mesh."""
    return f"{plan.base_mesh.describe()} micro_batch_size={base.micro_batch_size} recompute={base.recompute}"


def _mode_text(mesh: Mesh | None) -> str:
    return mesh.expert_mode.value if mesh is not None and mesh.expert > 1 else "no expert parallelism"


def _run(count: int, times: int) -> str:
    return f"{count} x {times}" if times > 1 else str(count)
