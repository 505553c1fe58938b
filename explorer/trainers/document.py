"""An export: its settings, in terms that every trainer has a name for, its text, and the lines of its header.

No setting changes what a model learns: there is no learning rate, no schedule, no seed. The global batch is that of the
request; if the request states none, accumulation is left to the trainer.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Parallelism
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.lengths import Batching
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import LIBRARY
from bexp.explorer.model.quantization import Quantization
from bexp.explorer.model.training import LoRASpec, Precision, Sharding, TrainingSpec, lora_arguments

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
    widens_shards: bool
    """Whether weights are float32 in the trainer's shards, and gathered in half precision: precision `master`."""
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
        """Whether products are computed in half precision under autocast; adapters are in float32.

        Sharded weights are kept in float32 and gathered in half precision, which the same keys ask for.
        """
        if self.dtype is DType.FLOAT32:
            return False
        is_wide = self.precision in ("autocast", "upcast") or self.widens_shards
        return is_wide or self.lora is not None

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


ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"

OF_THE_CODE = frozenset(
    {
        *("bf16", "fp16", "bfloat16", "float16", "pure_bf16", "torch_autocast", "mixed_precision", "torch_compile"),
        *("activation_checkpointing", "gradient_checkpointing", "disable_gradient_checkpointing"),
    }
)
"""Fields of precision, compilation and recomputation. A person's own target decides them by itself."""

WHAT_ELSE = "and what decides the learning"
"""The end of the line that lists the missing parts of a configuration."""


class ExportError(ValueError):
    """There is nothing to export yet, or nothing that a trainer could run; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class ExportDocument:
    """A file."""

    text: str
    media_type: str
    header: tuple[str, ...]
    """For people."""
    has_header: bool = True
    """Whether the text holds the header as comments."""


Render = Callable[[TrainerSettings], ExportDocument]


def json_export(settings: TrainerSettings, values: dict[str, Any], notes: Iterable[str] = ()) -> ExportDocument:
    """Return a JSON file. Its parser takes no comments and no unknown keys, so the header is not in the file."""
    text = json.dumps(decided_fields(settings, values), indent=2, allow_nan=False) + "\n"
    return ExportDocument(text, "application/json", (*settings.header, *notes), has_header=False)


def yaml_export(settings: TrainerSettings, values: dict[str, Any], notes: Iterable[str] = ()) -> ExportDocument:
    """Return a YAML file under its header."""
    header = (*settings.header, *notes)
    text = f"{comments(header)}{yaml.safe_dump(decided_fields(settings, values), sort_keys=False)}"
    return ExportDocument(text, "application/yaml", header)


def python_export(settings: TrainerSettings, code: str, notes: Iterable[str] = ()) -> ExportDocument:
    """Return Python code under its header; the allocator is set first, because it is read when CUDA starts."""
    header = (*settings.header, *notes)
    setting = ""
    if settings.allocator is not None:
        setting = f'import os\n\nos.environ["{ALLOCATOR_VARIABLE}"] = "{settings.allocator}"\n\n'
    return ExportDocument(f"{comments(header)}{setting}{code}", "text/x-python", header)


def shell_export(
    settings: TrainerSettings, variable: str, flags: Iterable[tuple[str, ...]], notes: Iterable[str] = ()
) -> ExportDocument:
    """Return a file for a shell to source, with an array `variable` of flags, one with its values on each line."""
    header = (*settings.header, *notes)
    setting = f"export {ALLOCATOR_VARIABLE}={settings.allocator}\n" if settings.allocator is not None else ""
    lines = "".join(f"  {shlex.join(flag)}\n" for flag in flags)
    return ExportDocument(f"{comments(header)}{setting}{variable}=(\n{lines})\n", "text/x-shellscript", header)


def comments(lines: Iterable[str]) -> str:
    """Return lines as comments, without characters that would end a comment's line."""
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def decided_fields(settings: TrainerSettings, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value; a framework keeps its own setting of a field that is left out."""
    return {key: value for key, value in values.items() if not (settings.is_own_code and key in OF_THE_CODE)}


OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(..., fused=True)",
    "sgd": "torch.optim.SGD(..., momentum=0.9, fused=True)",
    **{name: known.maker for name, known in LIBRARY.items()},
}
"""The code in a script that makes each measured optimizer."""
PREPARE = "model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)"
"""The code that casts weights which are not quantised to float32; recomputation is set apart from it."""


def script_notes(settings: TrainerSettings, holder: str | None = None) -> list[str]:
    """Return the settings of a script; `holder` is the class that takes the accumulation steps, if it is one."""
    lines = []
    if holder is not None:
        lines.append(f"in the script: DataLoader(batch_size={settings.micro_batch_size})")
        if settings.grad_accum_steps is not None:
            lines.append(f"in the script: {holder}({_accumulation(settings)})")
    lines += [*model_notes(settings), *optimizer_notes(settings), *length_notes(settings)]
    if settings.recompute is Recompute.FULL and (holder is None or settings.sharding is Sharding.NONE):
        lines.append("in the script: recompute every layer, for example model.gradient_checkpointing_enable()")
    elif settings.recompute is Recompute.NONE and not settings.is_own_code:
        lines.append("in the script: no gradient checkpointing, as measured")
    return lines


def model_notes(settings: TrainerSettings) -> list[str]:
    """Return the code of the script that makes the model, with its kernels and its adapters."""
    chosen = {"attn_implementation": settings.attention, "experts_implementation": settings.experts}
    given = [f'{name}="{value}"' for name, value in chosen.items() if value is not None]
    quantized = settings.quantization
    if quantized is not None and not quantized.is_own:
        given.append(f"quantization_config={quantization_config(quantized)}")
    arguments = ", ".join(given)
    lines = [f"in the script: AutoModelForCausalLM.from_pretrained(..., {arguments})"] if arguments else []
    if quantized is not None:
        if quantized.is_own:
            lines.append("in the script: the checkpoint's own quantization_config, as measured")
        lines.append(f"in the script: {PREPARE}")
    if settings.lora is not None:
        lines.append(f"in the script: peft.get_peft_model(model, {lora_config(settings.lora)})")
    return lines


def optimizer_notes(settings: TrainerSettings) -> list[str]:
    """Return the optimizer that was measured."""
    return [] if settings.is_own_code else [f"in the script: {OPTIMIZERS[settings.optimizer]}, as measured"]


def other_optimizer_notes(settings: TrainerSettings) -> list[str]:
    """Return the optimizer that was measured, if it is not AdamW, for a file that leaves the trainer its own."""
    if settings.is_own_code or settings.optimizer == "adamw":
        return []
    return [f"optimizer: measured with {OPTIMIZERS[settings.optimizer]}, which this file does not set"]


def length_notes(settings: TrainerSettings) -> list[str]:
    """Return the tokens of a sequence, on which the memory depends."""
    return [f"in the script: sequences of {settings.seq_length} tokens, as measured"] if settings.states_length else []


def expert_notes(settings: TrainerSettings) -> list[str]:
    """Return a note that a trainer which lists linear layers by itself leaves some of `all-linear` out."""
    if settings.lora is None or settings.lora.target_modules != "all-linear" or not settings.has_experts:
        return []
    return [
        "adapters: peft's all-linear was measured, which adapts experts in one tensor as well; this trainer's own list "
        "may have linear layers alone, which need less memory"
    ]


def plain_expert_notes(settings: TrainerSettings) -> list[str]:
    """Return a note on a trainer that keeps experts which are not quantised in another format than was measured."""
    if settings.quantization is None or not settings.halves_experts:
        return []
    return [
        f"memory: {settings.title} by itself keeps experts that are not quantised in {settings.dtype}; they were "
        "measured in float32, as peft prepares them"
    ]


def is_launched(settings: TrainerSettings) -> bool:
    """Return whether the person's configuration of `accelerate launch` says what is sharded, and no other file."""
    return "accelerate" in settings.request.get("kept", {})


def gathering_notes(settings: TrainerSettings) -> list[str]:
    """Return a note on FSDP with ZeRO-2, which shards the parameters again after each backward.

    Measured with ZeRO-2, parameters are gathered once a step: see `bexp.explorer.cost.collectives`.
    """
    if settings.sharding is not Sharding.ZERO2 or settings.grad_accum_steps == 1:
        return []
    return ["communication: parameters are gathered in each accumulation step, and not once a step as measured"]


def quantization_config(quantized: Quantization) -> str:
    """Return the transformers library's configuration of quantised weights, as Python."""
    return f"BitsAndBytesConfig({', '.join(f'{name}={value!r}' for name, value in quantized.arguments.items())})"


def lora_config(lora: LoRASpec) -> str:
    """Return the peft library's configuration of adapters, as Python."""
    arguments = ", ".join(
        f"{name}={value:g}" if name == "lora_alpha" else f"{name}={value!r}"
        for name, value in lora_arguments(lora).items()
    )
    return f"peft.LoraConfig({arguments})"


def _accumulation(settings: TrainerSettings) -> str:
    if settings.reduces_each_batch:
        plugin = f"GradientAccumulationPlugin(num_steps={settings.grad_accum_steps}, sync_each_batch=True)"
        return f"gradient_accumulation_plugin={plugin}"
    return f"gradient_accumulation_steps={settings.grad_accum_steps}"
