"""A mesh of devices, the run of a whole model on one, and the part of a recommendation that says how it is run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Parallelism
from bexp.explorer.model.amounts import rate_text, seconds_text
from bexp.explorer.model.base import Frozen
from bexp.explorer.records.plan import Plan, Replacement, SharedRun


class Mesh(Parallelism):
    """The devices of a request by axes: its sizes, with their number, and the groups within it."""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.tensor * self.pipeline * self.data

    @property
    def in_plain_mode(self) -> Mesh:
        """The same mesh with expert mode `plain`."""
        return self.model_copy(update={"overlap_degree": 1, "shadowed_experts": 0})

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The sizes of the mesh that a component of the experts names."""
        return {
            "expert_parallel_size": self.expert,
            "overlap_degree": self.overlap_degree,
            "shadowed_experts": self.shadowed_experts,
        }

    @property
    def block_key(self) -> tuple[int, ...]:
        """The sizes on which the blocks of a device depend; pipeline and data parallelism are not among them."""
        return self.tensor, self.expert, self.overlap_degree, self.shadowed_experts

    @property
    def family(self) -> tuple[object, ...]:
        """The mesh without the numbers of its expert mode: meshes that a search first ranks as one."""
        sizes = (self.tensor, self.pipeline, self.virtual_stages, self.expert, self.data)
        return *sizes, self.schedule, self.sharding, self.expert_mode

    @property
    def expert_data(self) -> int:
        """Devices that hold the same experts of a stage."""
        return self.tensor * self.data // self.expert if self.expert > 1 else self.data


class MeshRun(SharedRun):
    """A whole model on a mesh of devices: how many layers each stage has, and how many micro-batches its step has."""

    mesh: Mesh
    layers_per_stage: tuple[int, ...]
    num_micro_batches: Annotated[int, Field(ge=1)] = Field(description="Of one replica.")

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The groups of devices that exchange something: their size, and how far apart their members are."""
        mesh, ends = self.mesh, self.mesh.tensor * self.mesh.data
        groups = [(mesh.tensor, 1), (mesh.data, mesh.tensor), (mesh.pipeline, ends), (2, (mesh.pipeline - 1) * ends)]
        groups += [(mesh.expert, 1), (mesh.expert_data, mesh.expert)] if mesh.expert > 1 else []
        return tuple(dict.fromkeys(group for group in groups if group[0] > 1 and group[1] > 0))


MOST_PARTS = 5
LEGEND = "F forward, B backward, . waits; small letters: every second micro-batch"

Share = Annotated[float, Field(ge=0, le=1)]


class PlanPart(Frozen):
    """A part of the step with its share; bubbles are divided among the parts."""

    name: str
    share: Share = Field(description="Of the step.")


class PlainMesh(Frozen):
    """The best candidate with expert mode `plain`, for trainers that have no other."""

    mesh: Mesh
    candidate: Candidate
    tokens_per_second: float
    ratio: float = Field(description="Throughput of the recommended mesh relative to this one.")
    predicted: bool = Field(description="Whether a block of it is predicted and not measured.")
    layers_per_stage: tuple[int, ...]
    num_micro_batches: int
    fits: bool = Field(description="Whether it is expected to fit the memory.")


class PipelinePicture(Frozen):
    """The work of a pipeline's ranks in the first `seconds` of a step.

    A line has a character for each of equally long times: `F` forward, `B` backward, and `.` waiting. Every second
    micro-batch has small letters.
    """

    seconds: float
    ranks: tuple[int, ...]
    lines: tuple[str, ...]


class MeshPlan(Plan):
    """The recommended mesh. The shares are those of all devices' time; the optimizer counts as computation."""

    mesh: Mesh
    base_mesh: Mesh
    tokens_per_second: float = Field(description="Of all devices together.")
    compute_share: Share
    exchange_share: Share
    bubble_share: Share
    fullest_rank: int = Field(description="The rank of the pipeline whose memory the answer states, from 0.")
    parts: tuple[PlanPart, ...] = ()
    plain: PlainMesh | None = Field(None, description="Null if the recommended expert mode is `plain`.")
    picture: PipelinePicture | None = Field(None, description="Of the pipeline; null without one.")

    @property
    def parallelism(self) -> Parallelism:
        """The sizes that a trainer is given."""
        return self.mesh

    def rows(self) -> Iterable[tuple[str, str]]:
        """Yield the mesh, what its devices' time goes to, and what the ranks of a pipeline do."""
        mesh, picture = self.mesh, self.picture
        yield "mesh", f"{mesh.describe()} on {mesh.num_devices:,} devices"
        if mesh.pipeline > 1:
            layers = " ".join(_run(count, len(list(same))) for count, same in groupby(self.layers_per_stage))
            yield "layers", f"{layers} per stage; rank {self.fullest_rank} is the fullest"
        yield "all devices", rate_text(self.tokens_per_second)
        shares = (self.compute_share, "computation"), (self.exchange_share, "exchange"), (self.bubble_share, "bubble")
        yield "time", ", ".join(f"{share:.1%} {name}" for share, name in shares)
        yield from (("", f"{each.share:6.1%} {each.name}") for each in self.parts[:MOST_PARTS])
        if picture is not None:
            lines = (f"{rank:4d}  {line}" for rank, line in zip(picture.ranks, picture.lines, strict=True))
            title = f"the first {seconds_text(picture.seconds)} of a step, rank by rank"
            yield title, "\n".join((*lines, LEGEND))

    def describe_base(self, base: Candidate) -> str:
        """Return the base with its mesh."""
        return f"{self.base_mesh.describe()} micro_batch_size={base.micro_batch_size} recompute={base.recompute}"

    def header_line(self) -> str:
        """Return the line above an export."""
        return f"mesh: {self.mesh.describe()}; layers of each stage: {', '.join(map(str, self.layers_per_stage))}"

    def replacement(self) -> Replacement | None:
        """Return the best in plain mode, if the recommended one is in another, which no trainer has."""
        plain = self.plain
        if plain is None:
            return None
        same = {name: getattr(plain, name) for name in ("mesh", "layers_per_stage", "num_micro_batches")}
        return Replacement(self.model_copy(update=same), plain.candidate, plain.tokens_per_second)

    def lost_lines(self, trainer: str) -> list[str]:
        """Return what is used in place of a recommended expert mode that only bexp's kernels have."""
        if self.plain is None:
            return []
        lines = [
            f"lost: {trainer} cannot express expert mode '{self.mesh.expert_mode}' of the recommended mesh "
            f"({self.mesh.describe()}), which is planned to be {self.plain.ratio:.2f}x as fast"
        ]
        if not self.plain.fits:
            lines.append("memory: expert mode 'plain' is not expected to fit; explore again with expert_mode plain")
        return lines


def _run(count: int, times: int) -> str:
    return f"{count} x {times}" if times > 1 else str(count)
