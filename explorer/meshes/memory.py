"""The parameters that a device of a mesh holds, and its memory at the peak of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bexp.explorer.cost.collectives import Unit
from bexp.explorer.cost.step import GatheredBytes, MemoryParts, gathered_of_units
from bexp.explorer.meshes.layers import MeshBlocks, Sort
from bexp.explorer.meshes.mesh import Mesh
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.training import OptimizerSpec

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """The parameters of a stage, or of all stages of a rank."""

    dense: int
    """All but the spread experts."""
    experts: int
    """Those that expert parallelism spreads."""
    repeated: int
    """Those of `dense` that each tensor-parallel device has whole: norms, routers, and biases of sums."""
    largest: int
    """Those of the largest unit that sharding gathers at a time."""
    layer: int
    """Those of the largest layer."""
    head: int
    """Those of the unit with the head."""

    @property
    def number(self) -> int:
        """All of them."""
        return self.dense + self.experts

    def share(self, mesh: Mesh) -> int:
        """Return how many of them a device steps if training state is sharded."""
        return -(-self.dense // mesh.data) - (-self.experts // mesh.expert_data)

    def spread(self, mesh: Mesh) -> int:
        """Return how many of them sharding spreads: all but experts that one device alone has."""
        return self.dense + (self.experts if mesh.expert_data > 1 else 0)

    def gathered(self, mesh: Mesh, model: ModelSpec, spec: OptimizerSpec) -> GatheredBytes:
        """Return the parameters of a stage that sharding holds whole for a moment."""
        item, reduced = model.dtype.itemsize, spec.gradient_dtype(model.dtype).itemsize
        head, layer = Unit(self.head, self.head), Unit(self.layer, self.layer)
        is_tied = model.tie_embeddings and mesh.pipeline == 1
        return gathered_of_units(mesh.sharding, head, layer, item, reduced, mesh.data, is_tied=is_tied)

    @classmethod
    def of_stage(
        cls, sorts: Counter[Sort], blocks: MeshBlocks, mesh: Mesh, stage: int, model: ModelSpec
    ) -> HeldParameters:
        """Return those of a stage, whose layers are counted by sort; `model` is what a device has of the whole."""
        first, repeated = (blocks.embedding.parameters, blocks.embedding.repeated_parameters) if stage == 0 else (0, 0)
        head = 0
        if stage == mesh.num_stages - 1:
            head, repeated = blocks.head.parameters, repeated + blocks.head.repeated_parameters
            if model.tie_embeddings:  # one unit with the embedding, of which a pipeline's last rank has a copy
                head += first if mesh.pipeline == 1 else model.vocab_size * model.hidden_size
        extra = head if model.tie_embeddings and mesh.pipeline == 1 else first + head
        dense, experts, layer = extra, 0, 0
        for sort, count in sorts.items():
            own = sum(block.parameters for block in blocks.blocks[sort])
            spread = sum(block.expert_parameters for block in blocks.blocks[sort])
            dense, experts = dense + count * own, experts + count * spread
            repeated += count * sum(block.repeated_parameters for block in blocks.blocks[sort])
            layer = max(layer, own + (spread if mesh.expert_data > 1 else 0))
        return cls(dense, experts, repeated, max(extra, layer), layer, head)

    @classmethod
    def of_rank(cls, stages: Sequence[HeldParameters]) -> HeldParameters:
        """Return those of all stages of a rank."""
        return cls(
            sum(stage.dense for stage in stages),
            sum(stage.experts for stage in stages),
            sum(stage.repeated for stage in stages),
            *(max(getattr(stage, name) for stage in stages) for name in ("largest", "layer", "head")),
        )


def rank_memory(
    held: HeldParameters, mesh: Mesh, model: ModelSpec, spec: OptimizerSpec, activations: int, transient: int
) -> MemoryParts:
    """Return the memory of a rank at its peak; the levels of sharding are those of `bexp.explorer.cost.step`."""
    dtype, level = model.dtype, mesh.sharding.level
    gradient = spec.gradient_dtype(dtype).itemsize

    def kept(from_level: int) -> int:
        if level < 1:
            return held.number
        return held.share(mesh) + (held.spread(mesh) if level < from_level else 0)

    return MemoryParts(
        parameters=kept(3) * dtype.itemsize,
        gradients=kept(2) * gradient,
        master_weights=kept(1) * FLOAT32_BYTES if spec.has_master(dtype) else 0,
        optimizer_states=kept(1) * spec.num_states * spec.moment_dtype(dtype).itemsize,
        activations=activations,
        transient=transient,
    )
