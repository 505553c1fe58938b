"""Seconds and bytes of the layers of one device of a mesh, composed of those of its blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from explorer.cost_model.components import BlockRecompute, Component, ComponentKind
from explorer.cost_model.fabric_exchange import Link
from explorer.cost_model.mesh_layers import Block, MeshBlocks, Sort
from explorer.spec.mesh import Mesh
from explorer.spec.model import ModelSpec

WEIGHTS_SHARES = {ComponentKind.EMBEDDING: 1.0}
"""Share of a block's backward pass that computes gradients of weights, where it is not one half.

A matrix product has two in backward, one of which is for the weights.
"""
SCORES_BACKWARD = 2.5
"""Products of attention's scores in backward for each in forward; none of them is for weights."""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds and bytes of a component; the bytes may be smaller by `spared_share`, which is 0 if measured."""

    device_seconds: float
    host_seconds: float
    forward_share: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    relative_error: float
    spared_share: float = 0.0


Costs = Mapping[Component, BlockCost]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds and bytes of a layer for one micro-batch. The exchanges are part of `forward` and `backward`."""

    forward: float
    backward: float
    weights: float
    exchange: float
    saved_bytes: int
    transient_bytes: int
    makeup: Mapping[Component | Link, float]

    @property
    def seconds(self) -> float:
        """Both directions."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The blocks of a candidate with their costs, by sort of layer."""

    blocks: MeshBlocks
    by_sort: dict[Sort, LayerCost]
    embedding: LayerCost
    head: LayerCost

    def parts(self, sorts: Counter[Sort], stage: int, num_stages: int) -> list[tuple[LayerCost, int]]:
        """Return what a stage consists of, and how often."""
        found = [(self.by_sort[sort], count) for sort, count in sorts.items()]
        if stage == 0:
            found.append((self.embedding, 1))
        if stage == num_stages - 1:
            found.append((self.head, 1))
        return found


def compose_layer(
    blocks: Sequence[Block], costs: Costs, hidden: int, shard: ModelSpec, mesh: Mesh, sort: Sort | None
) -> LayerCost:
    """Compose a layer of one device; `sort` is null for embedding and head.

    `hidden` are the bytes that a layer passes on over all tensor-parallel devices. `shard` is what one of these has of
    the model.
    """
    again = sort is not None and sort[1]
    forward = backward = weights = exchanged = 0.0
    device = sum(costs[block.component].device_seconds for block in blocks)
    host = sum(costs[block.component].host_seconds for block in blocks)
    held = peak = 0
    makeup: defaultdict[Component | Link, float] = defaultdict(float)
    whole = 1.0 - 1.0 / mesh.tensor
    for block in blocks:
        cost = costs[block.component]
        seconds = cost.device_seconds if device >= host else cost.host_seconds
        first = seconds * cost.forward_share
        rest = seconds - first
        forward, backward = forward + first, backward + rest
        passed = rest - first if block.component.recompute is BlockRecompute.FULL else rest
        weights += max(0.0, passed) * _weights_share(block.component, shard)
        makeup[block.component] += seconds
        passes = 3 if again else 2
        exchanged += passes * block.exchange_seconds
        forward += block.exchange_seconds
        backward += (passes - 1) * block.exchange_seconds
        for transfer in block.exchanges:
            makeup[transfer.link] += passes * transfer.seconds
        kept = round(block.sharded_outputs * whole * hidden)
        saved = max(0, cost.saved_bytes - kept)
        peak = max(peak, held + cost.forward_peak_bytes - kept, held + cost.backward_peak_bytes - kept)
        held += saved
    output = round(hidden / mesh.tensor)
    saved = output if again else held
    return LayerCost(forward, backward, weights, exchanged, saved, max(0, peak + output - saved), makeup)


def _weights_share(component: Component, shard: ModelSpec) -> float:
    """Return the share of the backward pass that computes gradients of weights, by its operations."""
    if component.kind is not ComponentKind.ATTENTION:
        return WEIGHTS_SHARES.get(component.kind, 0.5)
    width = shard.num_attention_heads * shard.head_size
    products = 2.0 * shard.hidden_size * (2 * width + 2 * shard.query_groups * shard.head_size)
    scores = 2.0 * shard.seq_length * width
    return products / (2.0 * products + SCORES_BACKWARD * scores)
