"""The expected seconds and bytes of components of a model that a target describes by its parts.

The estimates follow from the target's counts. They only decide what is measured first; measured figures replace them.
"""

from __future__ import annotations

from bexp.explorer.cost.components import (
    BlockRecompute,
    Component,
    ComponentBytes,
    ComponentKind,
    Work,
)
from bexp.explorer.cost.parameters import master_bytes
from bexp.explorer.cost.request_texts import text_batches, widest
from bexp.explorer.dimensions.loss import function_of
from bexp.explorer.model.parts import ModelParts, Part
from bexp.explorer.request.request import ExplorationRequest

COMPILED_SHARE = 0.7
"""The share of its saved bytes that a compiled layer is expected to keep: a fused kernel stores no inner results."""
KEPT_SHARES = {
    BlockRecompute.NONE: 1.0,
    BlockRecompute.SELECTIVE: 0.9,
    BlockRecompute.ACTIVATIONS: 0.6,
    BlockRecompute.PROJECTIONS: 0.3,
    BlockRecompute.FULL: 1.0,
    BlockRecompute.TO_THE_END: 1.0,
    BlockRecompute.OFFLOAD: 0.0,
}
"""Share of its saved bytes that a layer is expected to keep under a policy by operation.

A layer that is recomputed as a whole keeps everything while it runs again.
"""


def part_of(component: Component, parts: ModelParts) -> Part:
    """Return the part that a layer or shell component stands for."""
    if component.kind is ComponentKind.SHELL:
        return parts.shell
    assert component.part is not None, "a layer names its kind"
    return parts.kind(component.part)


def predict_part_bytes(component: Component, parts: ModelParts, request: ExplorationRequest) -> ComponentBytes:
    """Return the expected activation bytes of one component, as `ComponentMeasurement` defines them."""
    if component.kind is ComponentKind.OPTIMIZER and request.training.keeps_master_weights:
        shards = request.sharded(component.sharding).devices.optimizer_shards
        return ComponentBytes(0, 0, -(-master_bytes(parts) // shards))  # all gradients in float32, while it steps
    if component.kind in {ComponentKind.OPTIMIZER, ComponentKind.COMMUNICATION}:
        return ComponentBytes(0, 0, 0)
    part = part_of(component, parts)
    tokens = component.micro_batch_size * widest(parts, request)
    output = tokens * parts.output_bytes_per_token
    live = round(tokens * part.saved_bytes_per_token)
    transient = round(tokens * part.transient_bytes_per_token)
    if component.kind is ComponentKind.SHELL and not function_of(component.setting).holds_logits:
        live, transient = min(live, 3 * output), min(transient, output)
    if component.is_compiled:
        live = round(COMPILED_SHARE * live)
    if request.mode == "eval":
        return ComponentBytes(output, output + transient, 0)
    saved = max(output, round(KEPT_SHARES[component.recompute] * live))
    if component.bta_tile is not None:
        saved = max(output, live // 2)  # attention, about half of the layer, is recomputed tile by tile
    if component.recompute is BlockRecompute.OFFLOAD:
        live = saved  # tensors come back one by one
    return ComponentBytes(saved, live + transient, live + transient + output)


def part_work(component: Component, parts: ModelParts, request: ExplorationRequest | None = None) -> Work:
    """Return the operations and bytes of a forward pass, in the mean over the micro-batches of a `request`'s texts."""
    part = part_of(component, parts)
    tokens: float = component.micro_batch_size * parts.seq_length
    batches = None if request is None else text_batches(request, component.micro_batch_size)
    if batches is not None:
        tokens = batches.expected_positions
    flops = tokens * part.flops_per_token + _attention_flops(component, parts, request)
    moved = part.parameter_bytes + 2.0 * tokens * part.saved_bytes_per_token
    if component.kind is ComponentKind.SHELL:
        reads = function_of(component.setting).reads(tokens, parts)
        moved += (reads - 1) * parts.head_parameters * parts.dtype.itemsize
    return Work(flops, moved)


def _attention_flops(component: Component, parts: ModelParts, request: ExplorationRequest | None) -> float:
    batches = None if request is None else text_batches(request, component.micro_batch_size)
    full = component.micro_batch_size if batches is None else batches.expected_pairs / parts.seq_length**2
    return full * part_of(component, parts).flops_per_sequence


def again_work(
    component: Component, parts: ModelParts, forward: Work, request: ExplorationRequest | None = None
) -> Work | None:
    """Return the work that the backward pass runs again; None if it runs nothing again.

    Tensors in the host's memory are read and written at least once on their way there, and once on their way back.
    """
    if component.recompute is BlockRecompute.OFFLOAD:
        tokens = component.micro_batch_size * parts.seq_length
        return Work(0.0, 2.0 * tokens * part_of(component, parts).saved_bytes_per_token)
    if component.recompute.is_whole or component.bta_tile is not None:
        return forward
    if component.recompute is BlockRecompute.SELECTIVE:
        return Work(_attention_flops(component, parts, request), 0.0)
    if component.recompute.by_operation:
        return Work(forward.flops / 3, forward.bytes / 2)
    return None
