"""The ways in which devices share a model: tensor, pipeline, expert and data parallelism.

Attention runs on tensor x data x pipeline devices. The experts of a layer are spread over `expert` devices of one
pipeline stage, which are neighbours. If `expert` is 1, the tensor-parallel devices share each expert instead. Tensor
parallelism includes sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.expert_modes import ExpertMode, ExpertModes, Sizes, named_sizes
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.training import Sharding


class Schedule(StrEnum):
    """The order in which the stages of a pipeline run."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


class ParallelismSpec(ExpertModes):
    """The sizes in which devices share the model. Each is a number, a list, or `explore`;

    data parallelism takes the rest.
    """

    tensor: Sizes = 1
    pipeline: Sizes = 1
    virtual_stages: Sizes = Field(1, description="Stages of each rank of an interleaved pipeline.")
    schedule: (
        Literal["explore"] | Schedule | Annotated[tuple[Schedule, ...], Field(min_length=1, max_length=len(Schedule))]
    ) = "explore"
    expert: Sizes = 1
    context: Sizes | None = None
    """Another way to write context_parallel.sizes; None in a stored request."""
    sharding: (
        Literal["explore"] | Sharding | Annotated[tuple[Sharding, ...], Field(min_length=1, max_length=len(Sharding))]
    ) | None = None
    """Another way to write training.sharding; None in a stored request."""

    @property
    def shares_model(self) -> bool:
        """Whether a size may be other than 1, so that devices share the model."""
        return any(named_sizes(getattr(self, name)) != (1,) for name in MODEL_PARALLEL_SIZES)

    @property
    def named_schedules(self) -> tuple[Schedule, ...]:
        """The schedules that are named; none with `explore`."""
        if self.schedule == "explore":
            return ()
        return (self.schedule,) if isinstance(self.schedule, Schedule) else self.schedule

    @property
    def spreads_experts(self) -> bool:
        """Whether experts may be on several devices."""
        return named_sizes(self.expert) != (1,)


MODEL_PARALLEL_SIZES = ("tensor", "pipeline", "virtual_stages", "expert")


class Parallelism(Frozen):
    """The way in which a number of devices share a model."""

    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    """Stages of each rank: above 1 only with schedule `interleaved`."""
    schedule: Schedule | None = None
    """None without a pipeline."""
    expert: int = 1
    overlap_degree: int = 1
    """Chunks of a micro-batch: above 1 only in expert mode `overlapped`."""
    shadowed_experts: int = 0
    """Experts that each device copies: above 0 only in expert mode `shadowed`."""
    data: int = 1
    sharding: Sharding = Sharding.NONE

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline over all ranks."""
        return self.pipeline * self.virtual_stages

    @property
    def is_data_parallel(self) -> bool:
        """Whether every device has the whole model, apart from what is sharded."""
        return self.tensor == self.pipeline == self.expert == 1

    @property
    def expert_mode(self) -> ExpertMode:
        """The mode in which tokens reach their experts."""
        if self.shadowed_experts:
            return ExpertMode.SHADOWED
        return ExpertMode.OVERLAPPED if self.overlap_degree > 1 else ExpertMode.PLAIN

    def describe(self) -> str:
        """Return the sizes in a line: `tensor=8 pipeline=4 (interleaved, 2 stages a rank) data=2 sharding=zero1`."""
        parts = [f"tensor={self.tensor}", f"pipeline={self.pipeline}"]
        if self.schedule is not None:
            stages = f", {self.virtual_stages} stages a rank" if self.virtual_stages > 1 else ""
            parts[-1] += f" ({self.schedule}{stages})"
        if self.expert > 1:
            modes = {
                ExpertMode.PLAIN: "",
                ExpertMode.OVERLAPPED: f" (overlapped in {self.overlap_degree} chunks)",
                ExpertMode.SHADOWED: f" ({self.shadowed_experts} shadowed)",
            }
            parts.append(f"expert={self.expert}{modes[self.expert_mode]}")
        return " ".join([*parts, f"data={self.data}", f"sharding={self.sharding}"])

    def describe_candidate(self, candidate: Candidate) -> str:
        """Return these sizes, which name the sharding, with the other settings of a candidate."""
        return f"{self.describe()} {candidate.model_copy(update={'sharding': None}).describe()}"


def expert_sharing(sizes: Parallelism | None) -> str:
    """Return how devices share the experts, in words."""
    return sizes.expert_mode.value if sizes is not None and sizes.expert > 1 else "no expert parallelism"
