"""The rows of an answer about a mesh of devices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from bexp.explorer.answers.rows import Row, main, part
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.mesh import Mesh
from bexp.explorer.model.amounts import rate_text, seconds_text
from bexp.explorer.records.plan import MeshPlan
from bexp.explorer.records.recommendation import Alternative

MOST_PARTS = 5
LEGEND = "F forward, B backward, . waits; small letters: every second micro-batch"


def mesh_rows(plan: MeshPlan) -> Iterable[Row]:
    """Yield the mesh, the shares of its devices' time, and the work of the ranks of a pipeline."""
    mesh = plan.mesh
    yield main("mesh", f"{mesh.describe()} on {mesh.num_devices:,} devices")
    if mesh.pipeline > 1:
        layers = " ".join(_run(count, len(list(same))) for count, same in groupby(plan.layers_per_stage))
        yield part("layers", f"{layers} per stage; rank {plan.fullest_rank} is the fullest")
    yield part("all devices", rate_text(plan.tokens_per_second))
    shares = f"{plan.compute_share:.1%} computation, {plan.exchange_share:.1%} exchange, {plan.bubble_share:.1%} bubble"
    yield part("time", shares)
    yield from (part("", f"{each.share:6.1%} {each.name}") for each in plan.parts[:MOST_PARTS])
    if plan.picture is not None:
        picture = plan.picture
        lines = (f"{rank:4d}  {line}" for rank, line in zip(picture.ranks, picture.lines, strict=True))
        title = f"the first {seconds_text(picture.seconds)} of a step, rank by rank"
        yield part(title, "\n".join((*lines, LEGEND)))


def base_text(plan: MeshPlan, base: Candidate) -> str:
    """Return the base with its mesh."""
    return f"{plan.base_mesh.describe()} micro_batch_size={base.micro_batch_size} recompute={base.recompute}"


def name_of(candidate: Candidate, mesh: Mesh | None) -> str:
    """Return a candidate with its mesh, which names the sharding."""
    if mesh is None:
        return candidate.describe()
    return f"{mesh.describe()} {candidate.model_copy(update={'sharding': None}).describe()}"


def on_mesh(other: Alternative) -> str:
    """Return an alternative of another mesh, with its tokens/s."""
    mesh = "" if other.mesh is None else other.mesh.describe()
    predicted = ", predicted in part" if other.predicted else ""
    return (
        f"{mesh} micro_batch_size={other.candidate.micro_batch_size} recompute={other.candidate.recompute} "
        f"({rate_text(other.tokens_per_second)}{predicted})"
    )


def mode_text(mesh: Mesh | None) -> str:
    """Return the way in which a mesh shares experts, in words."""
    return mesh.expert_mode.value if mesh is not None and mesh.expert > 1 else "no expert parallelism"


def _run(count: int, times: int) -> str:
    return f"{count} x {times}" if times > 1 else str(count)
