"""The keys of transformers' TrainingArguments and of peft's adapters, which several trainers' files have."""

from __future__ import annotations

from bexp.explorer.formats.trainers.trainer_file import (
    KERNELS,
    OTHER_LOSS,
    OTHER_OPTIMIZER,
    OTHER_WEIGHTS,
    PARALLEL,
    SHARDING,
    Key,
    Setting,
    flag,
    if_on,
    names,
    number,
    same,
)
from bexp.explorer.formats.training_fields import ARGUMENTS_IGNORED, ARGUMENTS_IGNORED_PREFIXES

SETTINGS: dict[str, Key] = {
    "per_device_train_batch_size": (Setting.MICRO_BATCH_SIZE, number),
    "gradient_accumulation_steps": (Setting.STEPS, number),
    "optim": (Setting.OPTIMIZER, same),
    "bf16": (Setting.HALF, flag),
    "gradient_checkpointing": (Setting.RECOMPUTATION, flag),
    "activation_checkpointing": (Setting.RECOMPUTATION, flag),
    "gradient_checkpointing_kwargs": (Setting.RECOMPUTATION_DETAILS, same),
    "activation_checkpointing_kwargs": (Setting.RECOMPUTATION_DETAILS, same),
    "torch_compile": (Setting.COMPILE, flag),
    "group_by_length": (Setting.ORDER, flag),
    "train_sampling_strategy": (Setting.ORDER, lambda value: value == "group_by_length"),
}
LORA: dict[str, Key] = {
    "lora_r": (Setting.R, same),
    "lora_alpha": (Setting.ALPHA, same),
    "lora_dropout": (Setting.DROPOUT, same),
    "lora_target_modules": (Setting.MODULES, names),
    "lora_target_parameters": (Setting.PARAMETERS, names),
    "lora_modules_to_save": (Setting.SAVED, names),
    "load_in_4bit": (Setting.BITS, if_on(4)),
    "load_in_8bit": (Setting.BITS, if_on(8)),
}
REFUSED = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), SHARDING),
    "parallelism_config": PARALLEL,
    "fp16": OTHER_WEIGHTS,
    "use_liger_kernel": KERNELS,
    "neftune_noise_alpha": OTHER_LOSS,
    "optim_target_modules": OTHER_OPTIMIZER,
    "auto_find_batch_size": "an exploration finds the size: remove it",
}
IGNORED = frozenset(
    {
        *(key for key in ARGUMENTS_IGNORED if key not in SETTINGS and key not in REFUSED),
        *(f"{prefix}*" for prefix in ARGUMENTS_IGNORED_PREFIXES),
        *("use_cache", "trackio_*", "liger_kernel_config"),
    }
)
