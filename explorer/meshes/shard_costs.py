"""Predicted seconds and bytes of the part that one device has of a block that several devices share."""

from __future__ import annotations

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import Component, ComponentBytes
from bexp.explorer.cost.roofline import PredictedSeconds, predict_component_seconds
from bexp.explorer.meshes.shards import SPREAD_EXPERTS, expert_chunk, expert_rows, shard_of
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.request.request import ExplorationRequest


def predict_shard_seconds(
    component: Component, model: ModelSpec, request: ExplorationRequest, hardware: HardwareSpec
) -> PredictedSeconds:
    """Return the seconds of a component; shared experts run as often as there are chunks."""
    if component.part != SPREAD_EXPERTS:
        return predict_component_seconds(component, *shard_of(component, model, request), hardware)
    chunk = predict_component_seconds(component, *expert_chunk(component, model, request), hardware)
    number = component.overlap_degree
    return PredictedSeconds(number * chunk.device, number * chunk.host, number * chunk.num_operations)


def predict_shard_bytes(component: Component, model: ModelSpec, request: ExplorationRequest) -> ComponentBytes:
    """Return the bytes of a component.

    Shared experts keep those of all chunks, and copies of shadowed experts with their gradients in backward. Buffers
    are what a device sends and gets back, and what the other devices send to it.
    """
    if component.part != SPREAD_EXPERTS:
        return predict_component_bytes(component, *shard_of(component, model, request))
    assert model.moe is not None, "a model with experts"
    chunk = predict_component_bytes(component, *expert_chunk(component, model, request))
    rows, item = expert_rows(component, model, request), model.dtype.itemsize
    width = (3 if model.gated_mlp else 2) * model.moe.expert_ffn_hidden_size
    copied = component.shadowed_experts * width * model.hidden_size * item
    moved = (2 * rows.moved_out + rows.moved_in) * model.hidden_size * item
    others = (component.overlap_degree - 1) * chunk.saved + copied
    return ComponentBytes(
        saved=chunk.saved + others,
        forward_peak=chunk.forward_peak + others + moved,
        backward_peak=chunk.backward_peak + others + moved + copied,
    )
