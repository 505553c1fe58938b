"""The training side beside a model: `deepspeed` (DeepSpeed's JSON) and `training_arguments` (transformers' JSON).

The batch, the number formats, the optimizer and the sharding are kept. The micro-batch of a file is the base to compare
with, because an exploration chooses it. A field that is neither read nor known to change nothing is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bexp.explorer.formats.training_fields import (
    ARGUMENTS_IGNORED,
    ARGUMENTS_IGNORED_PREFIXES,
    ARGUMENTS_REFUSED,
    DEEPSPEED_IGNORED,
    DEEPSPEED_REFUSED,
    ZERO_IGNORED,
)
from bexp.explorer.formats.translation import Section, Translation, put_dtype
from bexp.explorer.model.optimizers import ALIASES, LIBRARY
from bexp.explorer.model.spelling import shortened

KEYS = ("deepspeed", "training_arguments")
"""The fields of a document that hold these files."""

STAGES = ("none", "zero1", "zero2", "zero3")
DEEPSPEED_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd"}
ARGUMENTS_OPTIMIZERS = {**ALIASES, "sgd": "sgd", **{name: name for name in LIBRARY}}
FSDP_SHARDINGS = {"full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "none"}
_UNKNOWN = "is not a known field; remove it if it changes neither time nor memory"


def translate_training(document: Mapping[str, Any], translation: Translation, num_devices: Any) -> None:
    """Set the batch and the training state from the files of `document`; `num_devices` multiplies a device's batch."""
    top = translation.section(document, ())
    devices = num_devices if isinstance(num_devices, int) and num_devices >= 1 else 1
    arguments = top.section("training_arguments")
    batch = _read_arguments(arguments, devices) if "training_arguments" in document else None
    if isinstance(nested := arguments.get("deepspeed"), Mapping):
        if "deepspeed" in document:
            arguments.refuse("deepspeed", "is given a second time, beside deepspeed")
        _read_deepspeed(arguments.section("deepspeed"), devices, batch)
    elif nested:
        arguments.refuse("deepspeed", "is the path of a file: put its content here")
    if "deepspeed" in document:
        _read_deepspeed(top.section("deepspeed"), devices, batch)


def _read_arguments(arguments: Section, devices: int) -> tuple[int, int]:
    """Read TrainingArguments and return a device's batch and the accumulation steps, with transformers' defaults."""
    translation = arguments.translation
    arguments.refuse_where_set(ARGUMENTS_REFUSED)
    micro = arguments.integer("per_device_train_batch_size", 8, largest=1 << 20) or 1
    steps = arguments.integer("gradient_accumulation_steps", 1, largest=1 << 20) or 1
    translation.put(("batch_size",), micro * steps * devices, arguments.at("per_device_train_batch_size"))
    translation.put(("base_micro_batch_size",), micro, arguments.at("per_device_train_batch_size"))
    if arguments.boolean("fp16"):
        arguments.refuse("fp16", "float16 autocast is not supported: use bf16")
    if arguments.boolean("bf16"):
        translation.put(("training", "precision"), "autocast", arguments.at("bf16"))
    if "optim" in arguments:
        name = arguments.choice("optim", ARGUMENTS_OPTIMIZERS, "adamw_torch")
        translation.put(("training", "optimizer", "name"), name, arguments.at("optim"))
    _read_fsdp(arguments)
    if arguments.boolean("torch_compile"):
        translation.put(("execution",), "compile", arguments.at("torch_compile"))
    if arguments.boolean("gradient_checkpointing"):
        translation.notes.append("recomputation is open: gradient_checkpointing is on, and every policy is explored")
    arguments.ignore({"deepspeed", *ARGUMENTS_IGNORED})
    arguments.ignore({key for key in arguments.values if key.startswith(ARGUMENTS_IGNORED_PREFIXES)})
    arguments.refuse_unread(_UNKNOWN, {"n_gpu": devices})
    return micro, steps


def _read_fsdp(arguments: Section) -> None:
    fsdp = arguments.get("fsdp") or ""
    words = [str(word) for word in fsdp] if isinstance(fsdp, list | tuple) else str(fsdp).split()
    if not words:
        return
    if unknown := set(words) - set(FSDP_SHARDINGS) - {"auto_wrap"}:
        supported = ", ".join((*FSDP_SHARDINGS, "auto_wrap"))
        arguments.refuse("fsdp", f"{shortened(', '.join(sorted(unknown)))} is not supported; supported: {supported}")
        return
    level = next((FSDP_SHARDINGS[word] for word in words if word in FSDP_SHARDINGS), "zero3")
    arguments.translation.put(("training", "sharding"), level, arguments.at("fsdp"))


def _read_deepspeed(config: Section, devices: int, beside: tuple[int, int] | None) -> None:
    translation = config.translation
    config.refuse_where_set(DEEPSPEED_REFUSED)
    _read_batch(config, devices, beside)
    zero = config.section("zero_optimization")
    stage = zero.integer("stage", 0, largest=3) or 0
    for key in ("offload_optimizer", "offload_param"):
        if zero.section(key).get("device", "none") not in (None, "none"):
            zero.refuse(key, "offloading is not supported")
    for key in ("zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size"):
        if zero.get(key) not in (None, False, -1):
            zero.refuse(key, "is not supported")
    if zero.get("zero_hpz_partition_size", 1) != 1:
        zero.refuse("zero_hpz_partition_size", "must be 1")
    zero.ignore(ZERO_IGNORED)
    zero.refuse_unread(_UNKNOWN)
    translation.put(("training", "sharding"), STAGES[stage], zero.at("stage"))
    _read_formats(config)
    optimizer = config.section("optimizer")
    if optimizer.get("type") is not None:
        lowered = Section(translation, {"type": str(optimizer.values["type"]).lower()}, optimizer.location)
        name = lowered.choice("type", DEEPSPEED_OPTIMIZERS, "adamw")
        translation.put(("training", "optimizer", "name"), name, optimizer.at("type"))
    config.ignore(DEEPSPEED_IGNORED)
    config.refuse_unread(_UNKNOWN)


def _read_batch(config: Section, devices: int, beside: tuple[int, int] | None) -> None:
    """Set the batch: of two of its factors and itself, DeepSpeed derives the third; `auto` leaves it to the Trainer."""
    translation = config.translation
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, whole = (None if config.get(key) == "auto" else config.integer(key, largest=1 << 20) for key in keys)
    if beside is not None:
        for key, value, other in zip(keys, (micro, steps), beside, strict=False):
            if value not in (None, other):
                config.refuse(key, f"contradicts training_arguments, where it is {other}")
        micro, steps = beside
    if whole is None and micro is not None:
        whole = micro * (steps or 1) * devices
    if whole is None:
        return
    expected = None if micro is None or steps is None else micro * steps * devices
    if expected not in (None, whole):
        config.refuse(
            "train_batch_size", f"must be {expected}: micro-batch {micro} x {steps} steps x {devices} devices"
        )
    translation.put(("batch_size",), whole, config.at("train_batch_size"))
    if micro is not None:
        translation.put(("base_micro_batch_size",), micro, config.at("train_micro_batch_size_per_gpu"))


def _read_formats(config: Section) -> None:
    """Set the dtype of parameters, with float32 master weights; with `auto`, the Trainer's `bf16` says whether.

    The reference layers have master weights anyway. Adapters are measured in float32, which takes the same bytes.
    """
    translation, brain, half = config.translation, config.section("bf16"), config.section("fp16")
    on = [section.get("enabled", False) for section in (brain, half)]
    if on[0] == "auto" and translation.get("training", "precision") == "autocast":
        on[0] = True
    for section in (brain, half):
        section.ignore(section.values)
    if on[0] is not True and on[1] is not True:
        return
    name, section = ("bfloat16", brain) if on[0] is True else ("float16", half)
    if on[0] is True and on[1] is True:
        half.refuse("enabled", "contradicts bf16")
    has_master = isinstance(translation.get("hf_config"), Mapping) and not translation.get("training", "lora")
    translation.put(("training", "precision"), "master" if has_master else "pure", section.at("enabled"))
    put_dtype(translation, name, section.at("enabled"))
