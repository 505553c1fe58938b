"""What a step costs beside its components: training state, sharding, the optimizer's share, the limit."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from explorer.cost_model.activation_memory import FLOAT32_BYTES
from explorer.cost_model.collectives import ExchangeUnits
from explorer.cost_model.parameters import count_parameters
from explorer.spec.base import Frozen
from explorer.spec.hardware import HardwareSpec
from explorer.spec.parts import ExploredModel, ModelParts
from explorer.spec.request import ExplorationRequest

GIB = 2**30
FRAGMENTATION = {"default": 0.05, "expandable_segments": 0.02}
"""Bytes that the allocator needs beyond those that are allocated at the peak, as a share of them.

By default a freed block serves no larger request, so that a step needs more than its peak. When transformers' Trainer
ran Llama-3.2-1B and OLMoE on an H100, it reserved 5 to 13% more than it had allocated near the limit; a part of that
is cached blocks, which the allocator gives back before it fails. With expandable segments only rounding is left.
"""
MARGIN_BYTES = {"cuda": GIB // 2, "cpu": 64 * 2**20}
"""Kept free below the limit, for what no allocator statistic shows (library workspaces, NCCL buffers, threads)."""


class MemoryParts(Frozen):
    """Bytes of one device at the peak of a step, by what they hold."""

    parameters: int
    gradients: int = 0
    master_weights: int = 0
    optimizer_states: int = 0
    activations: int = Field(0, description="Saved by the forward pass for the backward pass.")
    transient: int = Field(0, description="Buffers alive at the peak moment only.")

    @property
    def total(self) -> int:
        """Allocated bytes at the peak."""
        return (
            self.parameters
            + self.gradients
            + self.master_weights
            + self.optimizer_states
            + self.activations
            + self.transient
        )


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step: `step` is (B c / (N m)) micro-steps, one optimizer step, and the communication.

    The ratio is a real number. `communication` is what the exchange of gradients and parameters adds to the whole step,
    beyond what computation hides; 0 where it is not timed.

    N devices form N / c groups that share sequences, each of which processes micro-batches of m; c is 1 without context
    parallelism. `tokens_per_second` are those of the whole step a device, B S / N over `step`, so that they compare
    across c.
    """

    micro_step: float
    optimizer: float
    step: float
    tokens_per_second: float
    communication: float = 0.0


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of one device. `required` is what must be below the limit: reserved, context and margin."""

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
    """A whole step from its micro-step, in which `context_parallel_size` devices share it, and its optimizer step.

    `communication` is what the exchange adds to all of the step.
    """
    training = request.mode == "train"
    share = request.group_batch_size(context_parallel_size) if training else float(micro_batch_size)
    step = share / micro_batch_size * micro_step + optimizer + communication
    tokens_per_second = share * model.seq_length / context_parallel_size / step
    return StepSeconds(micro_step, optimizer, step, tokens_per_second, communication)


def static_parts(model: ExploredModel, request: ExplorationRequest) -> MemoryParts:
    """Training state of one device: parameters, gradients, master weights, optimizer states, as sharded.

    It is sharded over all devices, those that share sequences among them: context parallelism is folded into the mesh
    that FSDP shards over, as torchtitan does (Liang et al., 2024, arXiv:2410.06511). What is needed whole beside a
    share of it that is stepped, parameters with ZeRO-1 and 2 and gradients with ZeRO-1, exists as both.
    """
    spec = request.training.optimizer
    if isinstance(model, ModelParts):  # its own code trains the parameters as they are: there are no master weights
        if request.mode == "eval":
            return MemoryParts(parameters=model.parameter_bytes)
        return MemoryParts(
            parameters=model.parameter_bytes,
            gradients=model.trainable_bytes,
            optimizer_states=spec.num_states * model.trainable_bytes,
        )
    number = count_parameters(model)
    item = model.dtype.itemsize
    if request.mode == "eval":
        return MemoryParts(parameters=number * item)
    level = request.training.sharding.level

    def shard(size: int, from_level: int) -> int:
        if level < 1:
            return size
        share = -(-size // request.num_devices)
        return share if level >= from_level else size + share

    return MemoryParts(
        parameters=shard(number * item, 3),
        gradients=shard(number * spec.gradient_dtype(model.dtype).itemsize, 2),
        master_weights=shard(number * FLOAT32_BYTES, 1) if spec.has_master(model.dtype) else 0,
        optimizer_states=shard(number * spec.num_states * spec.moment_dtype(model.dtype).itemsize, 1),
    )


def required_bytes(peak: int, hardware: HardwareSpec, allocator: str) -> int:
    """What a step with this allocated peak needs of the device: reserved, context and margin."""
    return round(peak * (1 + FRAGMENTATION[allocator])) + hardware.context_bytes + MARGIN_BYTES[hardware.device_kind]


def memory_limit(request: ExplorationRequest, hardware: HardwareSpec) -> int:
    """Bytes of one device that the job may use."""
    if request.memory_limit_gib is None:
        return hardware.memory_limit_bytes
    # On a CPU a person may ask for more than the cautious share; on a GPU what others hold cannot be had.
    most = hardware.memory_bytes if hardware.device_kind == "cpu" else hardware.memory_limit_bytes
    return min(round(request.memory_limit_gib * GIB), most)


@dataclass(frozen=True, slots=True)
class GatheredBytes:
    """What sharded training holds whole for a moment: while the head runs, and while a layer does."""

    at_head: int
    at_layer: int


def gathered_bytes(model: ExploredModel, request: ExplorationRequest) -> GatheredBytes:
    """As torch's fully_shard does (Zhao et al., 2023, arXiv:2304.11277).

    At a layer: with ZeRO-1 the buffer from which its gradients are reduced. From ZeRO-2 on these gradients as well, in
    the format of the parameters, and the buffer of the unit before, whose reduction has not ended. With ZeRO-3 also the
    parameters of a layer and the share from which they are gathered: of the one that runs, or of the next, by the time
    that the first has been let go of.

    At the head, where backward begins, nothing is being reduced: there are its own gradients, from ZeRO-2 on, and its
    parameters, with ZeRO-3. Of a matrix that is tied to the embedding the gradients wait for those of the embedding.
    """
    level = request.training.sharding.level
    if request.mode == "eval" or level < 1:
        return GatheredBytes(0, 0)
    units = ExchangeUnits.of(model)
    head, layer = (units.last or units.first).num_parameters, max(unit.num_parameters for unit in units.layers)
    item, buffered = model.dtype.itemsize, request.training.optimizer.gradient_dtype(model.dtype).itemsize
    if level == 1:
        return GatheredBytes(head * item if units.last is None else 0, layer * buffered)
    reduced = (layer + max(layer, head)) * buffered + layer * item
    if level == 2:
        return GatheredBytes(head * item, reduced)
    whole = layer * item
    return GatheredBytes(2 * head * item, reduced + whole + -(-whole // request.num_devices))
