"""The part of a recommendation for a mesh of devices, in addition to the figures of every candidate."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.mesh import Mesh
from bexp.explorer.model.base import Frozen

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


class MeshPlan(Frozen):
    """The recommended mesh. The shares are those of all devices' time; the optimizer counts as computation."""

    mesh: Mesh
    base_mesh: Mesh
    num_micro_batches: int = Field(description="Of one replica, in a step.")
    tokens_per_second: float = Field(description="Of all devices together.")
    compute_share: Share
    exchange_share: Share
    bubble_share: Share
    layers_per_stage: tuple[int, ...]
    fullest_rank: int = Field(description="The rank of the pipeline whose memory the answer states, from 0.")
    parts: tuple[PlanPart, ...] = ()
    plain: PlainMesh | None = Field(None, description="Null if the recommended expert mode is `plain`.")
    picture: PipelinePicture | None = Field(None, description="Of the pipeline; null without one.")
