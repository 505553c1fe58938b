"""transformers' Trainer: fields of its `TrainingArguments`, which TRL and LLaMA-Factory read as well.

An export is JSON for `TrainingArguments(**fields)` or `HfArgumentParser`. Settings of the model, of its data and of
peft stand in the header. Names as of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bexp.explorer.dimensions.attention import LIBRARY_ATTENTION
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import ALIASES, LIBRARY_ARGUMENTS, LIBRARY_NAMES
from bexp.explorer.model.training import Sharding
from bexp.explorer.model.translation import Section
from bexp.explorer.trainers.deepspeed import DEEPSPEED_KEY, read_config
from bexp.explorer.trainers.document import (
    ExportDocument,
    Render,
    TrainerSettings,
    json_export,
    length_notes,
    model_notes,
)
from bexp.explorer.trainers.fsdp import (
    FSDP,
    keep_recomputation,
    read_accelerator_config,
    read_fsdp,
    recomputes_by_fsdp,
    refuse_second_sharding,
    sharding_notes,
)
from bexp.explorer.trainers.keys import (
    UNKNOWN_FIELD,
    Batch,
    Key,
    Setting,
    Why,
    Write,
    fields_of,
    flag,
    if_on,
    is_among,
    key,
    names,
    number,
    turns_on,
    words,
)
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, OTHER_LIBRARIES, Trainer, expresses

EVERY_NTH_LAYER = {Recompute.FULL: 1, Recompute.PARTIAL_50: 2, Recompute.PARTIAL_25: 4}
"""The policies that recompute one layer of every so many."""


def autocast_in(dtype: DType, otherwise: bool | None = None) -> Write:
    """Return a writer of the switch of autocast in a format; `otherwise` is its value without autocast.

    There is no autocast where the weights are in the format of the products.
    """
    return lambda settings: (settings.dtype is dtype or None) if settings.has_autocast else otherwise


def _checkpointing(settings: TrainerSettings) -> bool:
    """Return whether the Trainer recomputes; FSDP recomputes layers itself."""
    return settings.recompute in EVERY_NTH_LAYER and not recomputes_by_fsdp(settings)


def _checkpointing_arguments(settings: TrainerSettings) -> dict[str, Any] | None:
    if not _checkpointing(settings):
        return None
    every = EVERY_NTH_LAYER[settings.recompute]
    return {"use_reentrant": False, **({"every_n_layers": every} if every > 1 else {})}


def optimizer_arguments(settings: TrainerSettings) -> str | None:
    """Return the momentum of the optimizer that was measured; none for a person's own code."""
    return None if settings.is_own_code else LIBRARY_ARGUMENTS.get(settings.optimizer)


BATCH: Mapping[str, Key] = {
    "per_device_train_batch_size": key(Setting.MICRO_BATCH_SIZE, number),
    "gradient_accumulation_steps": key(Setting.STEPS, number),
}
OPTIMIZER: Mapping[str, Key] = {"optim": key(Setting.OPTIMIZER), "optim_args": Key(write=optimizer_arguments)}
AUTOCAST: Mapping[str, Key] = {
    "bf16": Key(Setting.HALF, flag, autocast_in(DType.BFLOAT16)),
    "fp16": Key(write=autocast_in(DType.FLOAT16)),
}
CHECKPOINTING: Mapping[str, Key] = {
    # Its new name, since transformers 5.23, is unknown to every earlier version; until 6 all of them take this one.
    "gradient_checkpointing": Key(Setting.RECOMPUTATION, flag, _checkpointing),
    "gradient_checkpointing_kwargs": Key(Setting.RECOMPUTATION_DETAILS, write=_checkpointing_arguments),
    "activation_checkpointing": Key(Setting.RECOMPUTATION, flag),
    "activation_checkpointing_kwargs": Key(Setting.RECOMPUTATION_DETAILS),
}
ORDER: Mapping[str, Key] = {
    "group_by_length": Key(Setting.ORDER, flag),  # not since transformers 5.2
    "train_sampling_strategy": Key(
        Setting.ORDER,
        lambda value: value == "group_by_length",
        lambda settings: "group_by_length" if settings.batching == "grouped" else None,
    ),
}
ARGUMENTS: Mapping[str, Key] = {
    **BATCH,
    "auto_find_batch_size": Key(write=lambda settings: False),
    # The key compiles the whole model, and no export asks for that.
    "torch_compile": Key(Setting.COMPILE, flag, lambda settings: False),
    **OPTIMIZER,
    **AUTOCAST,
    **CHECKPOINTING,
    **FSDP,
    "deepspeed": DEEPSPEED_KEY,
    **ORDER,
}
LORA: Mapping[str, Key] = {
    "lora_r": key(Setting.R),
    "lora_alpha": key(Setting.ALPHA),
    "lora_dropout": key(Setting.DROPOUT),
    "lora_target_modules": key(Setting.MODULES, names),
    "lora_target_parameters": key(Setting.PARAMETERS, names),
    "lora_modules_to_save": key(Setting.SAVED, names),
    "load_in_4bit": key(Setting.BITS, if_on(4), turns_on(4)),
    "load_in_8bit": key(Setting.BITS, if_on(8), turns_on(8)),
}
"""Adapters by the names that Axolotl and TRL share."""
CHANGING: Mapping[str, str] = {
    "label_smoothing_factor": f"{Why.OTHER_LOSS}, for which the Trainer holds all logits",
    "full_determinism": Why.SLOWER,
    "torch_empty_cache_steps": Why.SLOWER,
}
"""Arguments that change the loss, speed or memory, each with why it is refused."""
COMPILES = "this compiles the whole model, which is not measured: remove it"
"""Why a backend or a mode of torch.compile is refused: either turns `torch_compile` on."""
REFUSED: Mapping[str, str] = {
    "parallelism_config": Why.PARALLEL,
    "fp16": Why.OTHER_WEIGHTS,
    "use_liger_kernel": Why.KERNELS,
    "neftune_noise_alpha": Why.OTHER_LOSS,
    "optim_target_modules": Why.OTHER_OPTIMIZER,
    "auto_find_batch_size": "an exploration finds the size: remove it",
    **CHANGING,
    "torch_compile_backend": COMPILES,
    "torch_compile_mode": COMPILES,
}
HARMLESS = words(
    """
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type lr_scheduler_kwargs
    warmup_ratio warmup_steps seed data_seed output_dir overwrite_output_dir
    run_name report_to project trackio_space_id do_train do_eval do_predict num_train_epochs max_steps disable_tqdm
    load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint ignore_data_skip
    restore_callback_states_from_checkpoint skip_memory_metrics prediction_loss_only per_device_eval_batch_size
    include_for_metrics include_inputs_for_metrics batch_eval_metrics use_legacy_prediction_loop label_names past_index
    remove_unused_columns length_column_name include_num_input_tokens_seen use_cpu no_cuda include_tokens_per_second
    average_tokens_across_devices local_rank debug log_level log_level_replica log_on_each_node use_mps_device
    jit_mode_eval enable_jit_checkpoint tf32 half_precision_backend fp16_opt_level fp16_backend bf16_full_eval
    fp16_full_eval fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap optim_args use_ipex
    logging_* save_* eval_* hub_* push_to_hub* dataloader_* ddp_* mp_*
    """
)
"""Fields of TrainingArguments that change neither speed nor memory, or are details of those that are read."""
_READ_BY_THEMSELVES = words(
    """
    group_by_length train_sampling_strategy gradient_checkpointing_kwargs parallelism_config optim_target_modules
    auto_find_batch_size accelerator_config
    """
)
_REFUSED_ARGUMENTS = {
    "use_liger_kernel": "kernels of Liger are not measured: remove it",
    "liger_kernel_config": "kernels of Liger are not measured: remove it",
    "neftune_noise_alpha": "noise on embeddings is not supported",
    "galore_config": "optimizers other than AdamW and SGD are not supported",
    **CHANGING,
}
_OPTIMIZERS = {**ALIASES, **{theirs: name for name, theirs in LIBRARY_NAMES.items()}}


def read_arguments(arguments: Section, devices: int, other: Batch | None) -> Batch:
    """Read TrainingArguments and return a device's batch and the accumulation steps, with transformers' defaults."""
    translation = arguments.translation
    arguments.refuse_where_set(_REFUSED_ARGUMENTS)
    micro = arguments.integer("per_device_train_batch_size", 8, largest=1 << 20) or 1
    steps = arguments.integer("gradient_accumulation_steps", 1, largest=1 << 20) or 1
    translation.put(("batch_size",), micro * steps * devices, arguments.at("per_device_train_batch_size"))
    translation.put(("base_micro_batch_size",), micro, arguments.at("per_device_train_batch_size"))
    if arguments.boolean("fp16"):
        arguments.refuse("fp16", "float16 autocast is not supported: use bf16")
    shards = _read_fsdp(arguments, devices)
    if arguments.boolean("bf16"):
        widens = shards and not translation.get("training", "lora")
        translation.put(("training", "precision"), "master" if widens else "autocast", arguments.at("bf16"))
    if "optim" in arguments:
        name = arguments.choice("optim", _OPTIMIZERS, "adamw_torch")
        translation.put(("training", "optimizer", "name"), name, arguments.at("optim"))
    compiles = {name: arguments.get(f"torch_compile_{name}") for name in ("backend", "mode")}  # either turns it on
    if arguments.boolean("torch_compile") or any(compiles.values()):
        translation.put(("execution",), "compile", arguments.at("torch_compile"))
    for name, measured in (("backend", "inductor"), ("mode", "default")):
        if compiles[name] not in (None, measured):
            arguments.refuse(f"torch_compile_{name}", f"is measured with {measured} alone")
    try:
        read_accelerator_config(arguments.get("accelerator_config"))
    except ValueError as error:
        arguments.refuse("accelerator_config", str(error))
    if arguments.boolean("gradient_checkpointing"):
        translation.put(("base_recompute",), Recompute.FULL.value, arguments.at("gradient_checkpointing"))
        translation.notes.append("recomputation is open: gradient_checkpointing is on, and every policy is explored")
    if isinstance(nested := arguments.get("deepspeed"), Mapping):
        if arguments.get("fsdp"):
            refuse_second_sharding(translation, arguments.at("deepspeed"), arguments.at("fsdp"))
        read_config(arguments.section("deepspeed"), devices, (micro, steps))
    elif nested:
        arguments.refuse("deepspeed", "is the path of a file: put its content here")
    arguments.ignore(_READ_BY_THEMSELVES)
    arguments.ignore({name for name in arguments.values if is_among(name, HARMLESS)})
    arguments.refuse_unread(UNKNOWN_FIELD, {"n_gpu": devices})
    return micro, steps


def _read_fsdp(arguments: Section, devices: int) -> bool:
    """Read the keys of FSDP, if `fsdp` turns it on; return whether several devices share the weights."""
    switch, config = arguments.get("fsdp"), arguments.get("fsdp_config")
    if not switch:
        return False
    if isinstance(config, str):
        arguments.refuse("fsdp_config", "is the path of a file: put its content here")
        config = None
    translation = arguments.translation
    nested = translation.section(config, arguments.at("fsdp_config"))
    found = read_fsdp(switch, nested, arguments.at("fsdp"))
    translation.put(("training", "sharding"), found.level.value, arguments.at("fsdp"))
    keep_recomputation(translation, found)
    if found.recomputes:
        translation.put(("base_recompute",), Recompute.FULL.value, nested.at("activation_checkpointing"))
    return devices > 1 and found.level is not Sharding.NONE


def arguments_export(keys: Mapping[str, Key], notes: Callable[[TrainerSettings], list[str]]) -> Render:
    """Return the writer of TrainingArguments with the fields and the notes of a trainer that is built on this one."""

    def render(settings: TrainerSettings) -> ExportDocument:
        values = fields_of(keys, settings)
        if settings.device_kind == "cpu":
            values["use_cpu"] = True
        own = [*model_notes(settings), *length_notes(settings), *sharding_notes(settings)]
        return json_export(settings, values, [*own, *notes(settings)])

    return render


LIBRARY_POLICIES = frozenset({Recompute.NONE, *EVERY_NTH_LAYER})
TRANSFORMERS_TRAINER = Trainer(
    name="transformers",
    title="transformers' Trainer",
    formats={"transformers": arguments_export(ARGUMENTS, lambda settings: [])},
    side_file=("training_arguments", read_arguments),
    expresses=expresses(
        recompute=LIBRARY_POLICIES,
        attention=LIBRARY_ATTENTION,
        experts=LIBRARY_EXPERTS,
        optimizer={OTHER_LIBRARIES},
        batching={"padded", "grouped"},
    ),
    targets=LIBRARY_RUNS_IT,
    awaits_losses=True,
    has_deepspeed=True,
    widens_shards=True,
)
