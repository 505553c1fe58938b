"""Lines of a header: settings of a person's script, and differences of a trainer from the measurement."""

from __future__ import annotations

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.optimizers import LIBRARY
from bexp.explorer.model.quantization import Quantization
from bexp.explorer.model.training import LoRASpec, Sharding, lora_arguments
from bexp.explorer.trainers.settings import TrainerSettings

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
