"""Predicted seconds of components before anything is measured: the roofline of Williams et al. (2009) and launches.

A component takes the time of its operations at the measured matmul peak or of its bytes at the measured bandwidth,
whichever is longer. Every kernel takes some time in addition, however small it is. The surrogate learns the distance of
real kernels from this. Only the shape over micro-batch, tile and policy matters here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bexp.explorer.cost.activation_memory import FLOAT32_BYTES, local_tokens, predict_component_bytes, rows_of_pair
from bexp.explorer.cost.collectives import CommunicationUnits, buffered_dtype
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind, Work
from bexp.explorer.cost.parameters import (
    count_attention,
    count_dense_ffn,
    count_head,
    count_moe_ffn,
    count_parameters,
    count_states,
    master_bytes,
)
from bexp.explorer.cost.part_costs import again_work, part_work
from bexp.explorer.dimensions.context_parallel import Sharing, busiest_pairs
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest

BACKWARD_FLOPS = 2.0  # a matmul's backward is two matmuls
FLASH_BACKWARD_FLOPS = 2.5  # flash attention's backward recomputes the scores: five matmuls for two
BY_OPERATION_PASSES = 0.5  # forward passes that recomputation by operation issues again, roughly
OPERATIONS = {  # eager operations of one forward pass, roughly; the backward pass issues about twice as many
    ComponentKind.EMBEDDING: 2,
    ComponentKind.ATTENTION: 20,
    ComponentKind.DENSE_FFN: 8,
    ComponentKind.MOE_FFN: 30,
    ComponentKind.HEAD: 20,
    ComponentKind.SHELL: 30,
    ComponentKind.LAYER: 50,
    ComponentKind.OPTIMIZER: 10,
    ComponentKind.COMMUNICATION: 10,
}
LEAST_SECONDS = 2e-6
"""Device seconds of a kernel in addition to its work: to start, to fill the device and to drain it.

Without them, a block at a small size would look inefficient, and so would other back ends at every size.
"""
FUSED_DEVICE_SHARE, FUSED_HOST_SHARE = 0.75, 0.7
"""First guesses of the device and host seconds of code with fused operations, as shares of those of eager code.

Four models of the library on an H100 take 0.46 to 0.74 of the device's
(benchmarks/results/h100-default-explorations.json).
"""
LINK_BYTES_PER_SECOND = {"cuda": 2e11, "cpu": 1e9}
"""A first guess of the bandwidth between devices, each way, which is measured before all else.

Links between the GPUs of a host pass 25 to 400 GB/s, loopback sockets 1 or 2 GB/s.
"""
HOP_OPERATIONS = 8
"""Operations of attention for each block of keys and values that comes from another device."""


@dataclass(frozen=True, slots=True)
class PredictedSeconds:
    """Device and host seconds of one forward and backward pass, or of one optimizer step, and its operations."""

    device: float
    host: float
    num_operations: float


def predict_component_seconds(
    component: Component, model: ExploredModel, request: ExplorationRequest, hardware: HardwareSpec
) -> PredictedSeconds:
    """Return the seconds of one component on `hardware`: the roofline's, and LEAST_SECONDS for each operation."""
    predicted = roofline_seconds(component, model, request, hardware)
    device = predicted.device + LEAST_SECONDS * predicted.num_operations
    if not component.is_fused:
        return replace(predicted, device=device)
    return replace(predicted, device=FUSED_DEVICE_SHARE * device, host=FUSED_HOST_SHARE * predicted.host)


def roofline_seconds(
    component: Component, model: ExploredModel, request: ExplorationRequest, hardware: HardwareSpec
) -> PredictedSeconds:
    """Return the roofline seconds of one component on `hardware`.

    If several devices share sequences, they are the seconds of the busiest one. The traffic between them is assumed to
    be hidden, because no link is known beforehand.
    """
    peak = hardware.matmul_peak(model.dtype)
    bandwidth = hardware.memory_bandwidth_bytes_per_second

    def seconds(work: Work) -> float:
        return max(work.flops / peak, work.bytes / bandwidth)

    if component.kind is ComponentKind.COMMUNICATION:
        link = LINK_BYTES_PER_SECOND[hardware.device_kind]
        communicated = _communicated_bytes(model, request.sharded(component.sharding))
        return _with_host(communicated / link, OPERATIONS[component.kind] * model.num_layers, hardware)
    if component.kind is ComponentKind.OPTIMIZER:
        stepped = _stepped_bytes(model, request) if isinstance(model, ModelParts) else _optimizer_bytes(model, request)
        moved = Work(0.0, stepped / request.sharded(component.sharding).devices.optimizer_shards)
        return _with_host(seconds(moved), OPERATIONS[component.kind], hardware)
    if isinstance(model, ModelParts):
        return _part_seconds(component, model, request, hardware, seconds)
    training = request.mode == "train"
    forward = _forward_work(component, model, request)
    hops = component.context_parallel_size - 1 if component.communicates else 0
    operations = OPERATIONS[component.kind] + HOP_OPERATIONS * hops
    passes = 1.0
    device = seconds(forward)
    if training:
        backward = _backward_work(component, forward, model)
        device += seconds(backward)
        passes = 3.0
        again = _recomputed_work(component, forward, model)
        if again is not None:
            device += seconds(again)
            passes += BY_OPERATION_PASSES if component.recompute.by_operation else 1.0
    tiles = component.micro_batch_size // component.bta_tile if component.bta_tile else 1
    return _with_host(device, operations * passes * tiles, hardware)


def _with_host(device: float, num_operations: float, hardware: HardwareSpec) -> PredictedSeconds:
    return PredictedSeconds(device, num_operations * hardware.launch_seconds, num_operations)


def _part_seconds(
    component: Component,
    parts: ModelParts,
    request: ExplorationRequest,
    hardware: HardwareSpec,
    seconds: Callable[[Work], float],
) -> PredictedSeconds:
    operations = OPERATIONS[component.kind]
    forward = part_work(component, parts, request)
    device = seconds(forward)
    if request.mode == "eval":
        return _with_host(device, operations, hardware)
    device += seconds(Work(BACKWARD_FLOPS * forward.flops, BACKWARD_FLOPS * forward.bytes))
    again = again_work(component, parts, forward, request)
    if again is not None:
        device += seconds(again)
    tiles = component.micro_batch_size // component.bta_tile if component.bta_tile else 1
    return _with_host(device, operations * (3.0 + (again is not None)) * tiles, hardware)


def _stepped_bytes(parts: ModelParts, request: ExplorationRequest) -> float:
    """Return the bytes that an optimizer step reads and writes: weights, moments and gradients.

    With master weights, gradients are converted to float32 first, and the new weights are written in both formats.
    """
    stepped, states = parts.trainable_bytes, 2 * request.training.optimizer.num_states
    if parts.optimizer_state_bytes is not None:
        return float((2 + 1) * stepped + 2 * parts.optimizer_state_bytes)
    if not request.training.keeps_master_weights:
        return float((2 + states + 1) * stepped)
    return float(2 * stepped + (1 + 2 + states + 1) * master_bytes(parts))


def _forward_work(component: Component, model: ModelSpec, request: ExplorationRequest) -> Work:
    tokens = local_tokens(component, model)
    item = model.dtype.itemsize
    moved = 2.0 * predict_component_bytes(_plain(component), model, request).saved
    if component.kind is ComponentKind.EMBEDDING:
        return Work(0.0, moved)
    if component.kind is ComponentKind.HEAD:
        flops = 2.0 * tokens * model.hidden_size * model.vocab_size
        logits = 3.0 * tokens * model.vocab_size * FLOAT32_BYTES
        return Work(flops, moved + logits + count_head(model) * item)
    if component.kind is ComponentKind.DENSE_FFN:
        parameters = count_dense_ffn(model)
        return Work(2.0 * tokens * parameters, moved + parameters * item)
    if component.kind is ComponentKind.MOE_FFN:
        moe = model.moe
        assert moe is not None
        parameters = count_moe_ffn(model)
        expert = (3 if model.gated_mlp else 2) * model.hidden_size * moe.expert_ffn_hidden_size
        active = parameters - (moe.num_experts - moe.top_k) * expert
        rows = rows_of_pair(component, model, request)
        return Work(2.0 * tokens * active * rows, moved + parameters * item)
    parameters = count_attention(model)
    tiles = component.micro_batch_size // (component.bta_tile or component.micro_batch_size)
    width = model.num_attention_heads * model.head_size
    activations = tokens * (4.0 * model.hidden_size + 4.0 * width) * item
    work = Work(2.0 * tokens * parameters, 2.0 * activations + tiles * parameters * item)
    core = _attention_core(component, model)
    return Work(work.flops + core.flops, work.bytes + core.bytes)


def _attention_core(component: Component, model: ModelSpec) -> Work:
    width = model.num_attention_heads * model.head_size
    if component.communicates:
        return _ring_core(component, model, width)
    scores = float(component.micro_batch_size) * model.seq_length**2
    if component.attention == "math":
        return Work(4.0 * scores * width, 8.0 * scores * model.num_attention_heads * FLOAT32_BYTES)
    return Work(2.0 * scores * width, 0.0)  # causal: half of the 4 S^2 H D


def _ring_core(component: Component, model: ModelSpec, width: int) -> Work:
    """Return the work of the busiest device; every block's output is merged into a sum in float32."""
    size = component.context_parallel_size
    pairs = busiest_pairs(Sharing(size, component.context_parallel_layout), model.seq_length)
    merged = float(size * local_tokens(component, model)) * width * (2 * FLOAT32_BYTES + model.dtype.itemsize)
    if component.attention == "math":
        scores = float(component.micro_batch_size) * pairs.scored
        return Work(4.0 * scores * width, 8.0 * scores * model.num_attention_heads * FLOAT32_BYTES + merged)
    return Work(4.0 * component.micro_batch_size * pairs.attended * width, merged)


def _backward_work(component: Component, forward: Work, model: ModelSpec) -> Work:
    flops = BACKWARD_FLOPS * forward.flops
    if component.kind is ComponentKind.ATTENTION and component.attention != "math":
        flops += (FLASH_BACKWARD_FLOPS - BACKWARD_FLOPS) * _attention_core(component, model).flops
    return Work(flops, BACKWARD_FLOPS * forward.bytes)


def _recomputed_work(component: Component, forward: Work, model: ModelSpec) -> Work | None:
    if component.recompute is BlockRecompute.SELECTIVE:
        return _attention_core(component, model)
    if component.recompute.by_operation:
        return _operations_work(component, forward, model)
    if component.recompute.is_whole and component.bta_tile is not None:
        return Work(2.0 * forward.flops, 2.0 * forward.bytes)  # once for the layer, once more for each tile
    if component.recompute.is_whole or component.bta_tile is not None:
        return forward
    return None


def _operations_work(component: Component, forward: Work, model: ModelSpec) -> Work:
    """Return the work of recomputation by operation.

    Norms, activations and gathers read and write about half of what the forward pass moves.
    """
    between = Work(0.0, forward.bytes / 2)
    if component.recompute is BlockRecompute.ACTIVATIONS:
        return between
    if component.kind is ComponentKind.ATTENTION:
        core = _attention_core(component, model).flops
        projected = model.num_attention_heads + 2 * (component.num_query_groups or model.query_groups)
        return Work((forward.flops - core) * projected / (projected + model.num_attention_heads), between.bytes)
    return Work(forward.flops * (2 / 3 if model.gated_mlp else 1 / 2), between.bytes)


def _plain(component: Component) -> Component:
    """Return the block without recomputation by operation, because forward moves the same bytes with it."""
    if not component.recompute.by_operation:
        return component
    return component.model_copy(update={"recompute": BlockRecompute.NONE})


def _communicated_bytes(model: ExploredModel, request: ExplorationRequest) -> float:
    """Return the bytes that a device sends in all gathers and reductions of a step, without repeats.

    A ring of N devices sends (N - 1) / N of the bytes in a gather or a reduction, and twice that in an all-reduce.
    """
    sharding = request.training.sharding
    gradients = 2 if sharding is Sharding.NONE else 1
    gathers = {Sharding.NONE: 0, Sharding.ZERO3: 2}.get(sharding, 1)
    units = CommunicationUnits.of(model)
    whole = gradients * units.num_gradients * buffered_dtype(model, request).itemsize
    whole += gathers * units.num_parameters * model.dtype.itemsize
    return float(whole) * (request.num_devices - 1) / request.num_devices


def _optimizer_bytes(model: ModelSpec, request: ExplorationRequest) -> float:
    spec = request.training.optimizer
    item = model.dtype.itemsize
    states = 2 * count_states(model, spec) * spec.moment_dtype(model.dtype).itemsize
    master = 2 * FLOAT32_BYTES + item if spec.has_master(model.dtype) else 2 * item
    return float(count_parameters(model) * (master + 2 * spec.gradient_dtype(model.dtype).itemsize) + states)
