"""What fills a candidate's memory at the peak of its step, and the tensors of the largest part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from bexp.explorer.cost.activation_memory import FLOAT32_BYTES
from bexp.explorer.cost.composition import Composition, Floats
from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.cost.request_texts import widest
from bexp.explorer.dimensions.loss import function_of
from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.model.training import Sharding


class PeakContent(StrEnum):
    """A part of the memory at the peak."""

    PARAMETERS = "weights"
    GRADIENTS = "gradients"
    MASTER_WEIGHTS = "master weights"
    OPTIMIZER_STATES = "optimizer states"
    ACTIVATIONS = "saved activations"
    LOGITS = "logits"
    BUFFERS = "buffers of the step"


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The bytes of a candidate at its peak, by content."""

    parts: Mapping[PeakContent, int]
    largest: PeakContent
    tensors: str
    """Those of the largest part, and the setting that holds them."""

    @property
    def is_wall(self) -> bool:
        """Whether the largest part is most of the memory, so that little helps that leaves it as it is."""
        return 2 * self.parts[self.largest] > sum(self.parts.values())

    def describe(self) -> str:
        """Return the largest part: `logits with 5.8 GiB (8 x 512 x 152,064 in float32 = 2.3 GiB, ...)`."""
        return f"{self.largest} with {bytes_text(self.parts[self.largest])} ({self.tensors})"


def peak_memory(table: Composition, row: int, bytes_3K: Floats) -> PeakMemory:
    """Return what fills a candidate's memory at its peak.

    `bytes_3K` are the saved, forward-peak and backward-peak bytes of the table's components.
    """
    saved_C, transient_C = table.activation_bytes(*bytes_3K)
    static, transient = table.static_parts(row), float(transient_C[row])
    is_loss = _holds_logits(table, row) and table.is_head_at_peak(row, transient, *bytes_3K[1:])
    parts = {
        PeakContent.PARAMETERS: static.parameters,
        PeakContent.GRADIENTS: static.gradients,
        PeakContent.MASTER_WEIGHTS: static.master_weights,
        PeakContent.OPTIMIZER_STATES: static.optimizer_states,
        PeakContent.ACTIVATIONS: round(float(saved_C[row])),
        PeakContent.LOGITS if is_loss else PeakContent.BUFFERS: round(transient),
    }
    largest = max(parts, key=lambda content: parts[content])
    return PeakMemory(parts, largest, _tensors(table, row, largest))


def _holds_logits(table: Composition, row: int) -> bool:
    """Return whether the logits of all tokens lie in memory at once while the head runs."""
    if isinstance(table.model, ModelParts):
        return table.model.computes_losses and function_of(table.decompositions[row].head.setting).holds_logits
    return table.request.training.loss.kind == "full"


def _tensors(table: Composition, row: int, content: PeakContent) -> str:
    candidate, model = table.candidates[row], table.model
    request = table.request.sharded(candidate.sharding)
    training = request.training
    length = widest(model, table.request) // candidate.context_parallel_size
    tokens = f"{candidate.micro_batch_size} x {length:,}"
    if content is PeakContent.LOGITS:
        held = f"held by loss={candidate.loss or training.loss.kind}"
        logits = model.logits_per_token if isinstance(model, ModelParts) else model.vocab_size
        if logits is None:
            return f"{tokens} tokens, {held}"
        copy = bytes_text(candidate.micro_batch_size * length * logits * FLOAT32_BYTES)
        return f"{tokens} x {logits:,} in float32 = {copy}, {held}"
    if content is PeakContent.ACTIVATIONS:
        return f"{tokens} tokens in {model.num_layers} layers, kept by recompute={candidate.recompute}"
    if content is PeakContent.BUFFERS:
        return f"{tokens} tokens"
    of = f"{count_parameters(model):,} parameters" if content is PeakContent.PARAMETERS else "of the trained parameters"
    held = f", held by optimizer={training.optimizer.name}" if content is PeakContent.OPTIMIZER_STATES else ""
    if content is PeakContent.GRADIENTS and request.devices.hold_buckets:
        held = ", again in DistributedDataParallel's buckets"
    return of + held + ("" if training.sharding is Sharding.NONE else f", sharding={training.sharding}")
