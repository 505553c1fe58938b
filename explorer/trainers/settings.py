"""The exported execution of a training run, in terms that every trainer has a name for.

It has no setting that changes what a model learns: no learning rate, no schedule, no seed. The global batch is that of
the request; if the request states none, accumulation is left to the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Parallelism
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.lengths import Batching
from bexp.explorer.model.model import DType
from bexp.explorer.model.quantization import Quantization
from bexp.explorer.model.training import LoRASpec, Precision, Sharding, TrainingSpec

HALF_NAMES: dict[str, str] = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
"""Trainers' names of the formats of half precision, such as the fields that switch autocast on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The execution of a training run, with replacements for settings that the trainer cannot express."""

    candidate: Candidate
    """As it was measured."""
    training: TrainingSpec
    """As it was asked for."""
    title: str
    """The trainer, for people."""
    header: tuple[str, ...]
    """Line by line: the source, the replacements, and the other settings to make."""

    target_name: str
    """The code that was measured."""
    is_own_code: bool
    """Whether a person's own target was measured, whose code decides precision, recomputation and kernels."""
    model: Mapping[str, Any]
    """The fields of a request that describe the model."""
    request: Mapping[str, Any]
    """All fields of the request, as JSON has them."""
    hardware: HardwareSpec | None

    seq_length: int
    """Tokens of a sequence; 1 if the target states none."""
    dtype: DType
    """Of the matrix products."""
    precision: Precision
    """The measured one if the trainer has it, else the nearest that it has."""
    quantization: Quantization | None
    halves_experts: bool
    """Whether experts stay plain in a quantised model, and the trainer keeps them in half precision."""

    batch_size: int | None
    """Sequences of a step over all devices; None if the request states none."""
    num_devices: int
    device_kind: str
    grad_accum_steps: int | None
    """None if the request states no batch."""
    batching: Batching | None
    """The batching of texts of unequal length; None if every sequence was measured full."""
    tokens_per_sequence: float | None
    """The mean of texts of unequal length; None if they were measured full."""

    recompute: Recompute
    recomputed_layers: tuple[int, ...]
    """The indices of the layers that are recomputed as a whole."""
    attention: str | None
    """By the transformers library's names; None is the trainer's own choice."""
    experts: str | None
    """By the transformers library's names; None is the trainer's own choice."""
    chunked_loss: bool
    compiled_layers: bool
    sharding: Sharding
    context_parallel_size: int
    parallelism: Parallelism | None
    """How devices share the model; None if they do not."""
    layers_per_stage: tuple[int, ...]
    """Of the pipeline."""
    varies_query_groups: bool
    """Whether models with several numbers of query groups were explored; the model's own is one of them."""
    expandable_segments: bool
    """Whether PyTorch's allocator is not the default."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-step."""
        return self.candidate.micro_batch_size

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.candidate.expert_backend is not None

    @property
    def optimizer(self) -> str:
        """The name of the optimizer that was measured."""
        return self.training.optimizer.name

    @property
    def lora(self) -> LoRASpec | None:
        """The adapters; None if all weights are trained."""
        return self.training.lora

    @property
    def allocator(self) -> str | None:
        """The value of PyTorch's variable for its allocator; None for the default."""
        return "expandable_segments:True" if self.expandable_segments else None

    @property
    def has_autocast(self) -> bool:
        """Whether products are computed in half precision under autocast; adapters are in float32."""
        return self.dtype is not DType.FLOAT32 and (self.precision in ("autocast", "upcast") or self.lora is not None)

    @property
    def packs(self) -> bool:
        """Whether texts are packed into full sequences."""
        return self.batching == "packed"

    @property
    def has_flash_attention(self) -> bool:
        """Whether attention is that of the flash-attn package, which takes rows of several texts without a mask."""
        return (self.attention or "").startswith("flash_attention")

    @property
    def states_length(self) -> bool:
        """Whether the tokens of a sequence are known; a person's own target may state none."""
        return self.seq_length > 1

    @property
    def has_pipeline(self) -> bool:
        """Whether the layers are spread over the stages of a pipeline."""
        return self.parallelism is not None and self.parallelism.pipeline > 1

    @property
    def data_parallel_size(self) -> int:
        """Groups of devices that process sequences of their own."""
        if self.parallelism is not None:
            return self.parallelism.data
        return self.num_devices // self.context_parallel_size

    @property
    def reduces_each_batch(self) -> bool:
        """Whether gradients are reduced in each accumulation step, as measured with ZeRO-2 and ZeRO-3.

        By default accelerate and transformers' Trainer reduce them only in the last step (see `sync_each_batch`), and
        hold whole gradients until then.
        """
        return self.sharding in (Sharding.ZERO2, Sharding.ZERO3) and self.grad_accum_steps != 1
