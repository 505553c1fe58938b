"""The cost of a step outside its components: training state, sharding, the optimizer's share, the memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from bexp.explorer.cost.activation_memory import FLOAT32_BYTES
from bexp.explorer.cost.collectives import CommunicationUnits, Unit, buffered_dtype
from bexp.explorer.cost.parameters import count_parameters, count_states, master_bytes
from bexp.explorer.cost.request_texts import tokens_per_sequence
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest

GIB = 2**30
FRAGMENTATION = {"default": 0.05, "expandable_segments": 0.02}
"""The additional bytes of the allocator at the peak, as a share of the allocated bytes.

By default a freed block serves no larger request, so that a step needs more than its peak. When transformers' Trainer
ran Llama-3.2-1B and OLMoE on an H100, it reserved 5 to 13% more than it had allocated near the limit; a part of that
is cached blocks, which the allocator gives back before it fails. With expandable segments only rounding is left.
"""
MARGIN_BYTES = {"cuda": GIB // 2, "cpu": 64 * 2**20}
"""Bytes kept free below the limit, for library workspaces, NCCL buffers and threads that the allocator does not see."""


class MemoryParts(Frozen):
    """Bytes of one device at the peak of a step, by their content."""

    parameters: int
    gradients: int = 0
    master_weights: int = 0
    optimizer_states: int = 0
    activations: int = Field(0, description="Saved by the forward pass for the backward pass.")
    transient: int = Field(0, description="Buffers alive at the peak moment only.")

    @property
    def total(self) -> int:
        """Allocated bytes at the peak."""
        return sum(size for _, size in self)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step.

    N devices form N / c groups that share sequences, each of which processes micro-batches of m sequences; c is 1
    without context parallelism.
    """

    micro_step: float
    optimizer: float
    step: float
    """(B c / (N m)) micro-steps, a real number, one optimizer step, and the communication."""
    tokens_per_second: float
    """Of one device over the whole step, B S / (N `step`), so that candidates with different c compare."""
    communication: float = 0.0
    """The time that the exchange of gradients and parameters adds to the step; 0 if it is not timed."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of one device. `required`, with fragmentation, context and margin, must not exceed the limit."""

    parts: MemoryParts
    required: int

    @property
    def peak(self) -> int:
        """max_memory_allocated of the step."""
        return self.parts.total


def combine_seconds(
    micro_step: float,
    optimizer: float,
    micro_batch_size: int,
    model: ExploredModel,
    request: ExplorationRequest,
    *,
    context_parallel_size: int = 1,
    communication: float = 0.0,
) -> StepSeconds:
    """Return the seconds of a whole step from those of its micro-step and of its optimizer step.

    `context_parallel_size` devices share a micro-step. `communication` is the time that the exchange adds to the step.
    """
    training = request.mode == "train"
    share = request.devices.batch_share * context_parallel_size if training else float(micro_batch_size)
    step = share / micro_batch_size * micro_step + optimizer + communication
    tokens_per_second = share * tokens_per_sequence(model, request) / context_parallel_size / step
    return StepSeconds(micro_step, optimizer, step, tokens_per_second, communication)


def static_parts(model: ExploredModel, request: ExplorationRequest) -> MemoryParts:
    """Return the training state of one device: parameters, gradients, master weights and optimizer states.

    It is sharded over all devices, also those that share sequences: context parallelism is folded into the group that
    FSDP shards over, as torchtitan does (Liang et al., 2024, arXiv:2410.06511). Some tensors exist whole and as the
    share that the optimizer steps: parameters with ZeRO-1 and 2, and gradients with ZeRO-1.

    transformers' trainers drop gradients after a step. So the shares of ZeRO-1 are made in the last backward, while
    whole gradients are freed. The buckets of replicas hold copies of all gradients (`gradient_as_bucket_view` of
    DistributedDataParallel is off).
    """
    whole = _whole_parts(model, request)
    if request.mode == "eval":
        return MemoryParts(parameters=whole.parameters)
    level = request.training.sharding.level

    def shard(size: int, from_level: int) -> int:
        if level < 1:
            return size
        share = -(-size // request.num_devices)
        return share if level >= from_level else size + share

    return MemoryParts(
        parameters=shard(whole.parameters, 3),
        gradients=_gradient_bytes(model, request, whole.gradients),
        master_weights=shard(whole.master_weights, 1),
        optimizer_states=shard(whole.optimizer_states, 1),
    )


def _gradient_bytes(model: ExploredModel, request: ExplorationRequest, whole: int) -> int:
    level = request.training.sharding.level
    if level < 1:
        return 2 * whole if request.devices.hold_buckets else whole
    share = -(-whole // request.num_devices)
    if level > 1:
        return share
    return whole if isinstance(model, ModelParts) else whole + share


def _whole_parts(model: ExploredModel, request: ExplorationRequest) -> MemoryParts:
    spec = request.training.optimizer
    if isinstance(model, ModelParts):  # its own code trains the parameters as they are, unless it has master weights
        master = request.training.keeps_master_weights
        stepped = master_bytes(model) if master else model.trainable_bytes
        states = model.optimizer_state_bytes
        return MemoryParts(
            parameters=model.parameter_bytes,
            gradients=model.trainable_bytes,
            master_weights=stepped if master else 0,
            optimizer_states=spec.num_states * stepped if states is None else states,
        )
    number = count_parameters(model)
    return MemoryParts(
        parameters=number * model.dtype.itemsize,
        gradients=number * spec.gradient_dtype(model.dtype).itemsize,
        master_weights=number * FLOAT32_BYTES if spec.has_master(model.dtype) else 0,
        optimizer_states=count_states(model, spec) * spec.moment_dtype(model.dtype).itemsize,
    )


def required_bytes(peak: int, hardware: HardwareSpec, allocator: str) -> int:
    """Return the bytes of the device that a step with this allocated peak needs: reserved, context and margin."""
    return round(peak * (1 + FRAGMENTATION[allocator])) + hardware.context_bytes + MARGIN_BYTES[hardware.device_kind]


def memory_limit(request: ExplorationRequest, hardware: HardwareSpec) -> int:
    """Return the bytes of one device that the job may use: the limit without the request's headroom."""
    limit = hardware.memory_limit_bytes
    if request.memory_limit_gib is not None:
        limit = min(round(request.memory_limit_gib * GIB), hardware.most_memory_bytes)
    return round((1.0 - request.headroom) * limit) if request.headroom else limit


@dataclass(frozen=True, slots=True)
class GatheredBytes:
    """Bytes that sharded training holds whole for a moment: while the head runs, and while a layer runs.

    `after_layer` is the part of `at_layer` that exists only after the layer has freed its saved tensors: the buffer
    from which its gradients are reduced.
    """

    at_head: int
    at_layer: int
    after_layer: int = 0


def gathered_bytes(model: ExploredModel, request: ExplorationRequest) -> GatheredBytes:
    """Return the bytes that torch's fully_shard holds whole (Zhao et al., 2023, arXiv:2304.11277).

    While a layer runs, ZeRO-1 holds the buffer from which the layer's gradients are reduced. ZeRO-2 also holds these
    gradients in the format of the parameters, and the buffer of the unit before, whose reduction has not ended. ZeRO-3
    also holds the parameters of a layer and the share from which they are gathered. That layer is the one that runs, or
    the next one as soon as the first is freed.

    While the head runs, where backward begins, nothing is being reduced. ZeRO-2 holds the head's gradients, and ZeRO-3
    also its parameters. The gradients of a head that is tied to the embedding wait for those of the embedding.
    """
    level = request.training.sharding.level
    if request.mode == "eval" or level < 1:
        return GatheredBytes(0, 0)
    units = CommunicationUnits.of(model)
    end, layer = units.last or units.first, max(units.layers, key=lambda unit: unit.num_parameters)
    item, buffered = model.dtype.itemsize, buffered_dtype(model, request).itemsize
    return gathered_of_units(
        request.training.sharding, end, layer, item, buffered, request.num_devices, is_tied=units.last is None
    )


def gathered_of_units(
    sharding: Sharding, end: Unit, layer: Unit, item: int, buffered: int, num_devices: int, *, is_tied: bool
) -> GatheredBytes:
    """Return `gathered_bytes` of the unit with the head and of the largest layer.

    With `is_tied`, the first unit has the embedding, too. Parameters have `item` bytes a number, and the buffers from
    which gradients are reduced have `buffered`.
    """
    level = sharding.level
    if level < 1:
        return GatheredBytes(0, 0)
    head, buffer = end.num_gradients * item, layer.num_gradients * buffered
    if level == 1:
        return GatheredBytes(head if is_tied else 0, buffer, buffer)
    largest = max(layer.num_gradients, end.num_gradients)
    reduced = buffer + largest * buffered + layer.num_gradients * item
    if level == 2:
        return GatheredBytes(head, reduced, buffer)
    whole = layer.num_parameters * item
    gathered = whole + -(-whole // num_devices)
    return GatheredBytes(head + end.num_parameters * item, reduced + gathered, buffer)
