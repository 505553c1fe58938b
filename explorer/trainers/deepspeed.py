"""A DeepSpeed configuration, as JSON. Names as of DeepSpeed 0.19.

`train_batch_size` is left out: DeepSpeed derives it from the number of processes, and refuses a figure that differs.
DeepSpeed ignores keys that it does not know, so the header stands under `_bexp`.

By default stages 1 and 2 of ZeRO reduce gradients after backward, and stage 3 during backward (the validator of
`overlap_comm` in deepspeed/runtime/zero/config.py). The figures assume the latter, so `overlap_comm` is on. Stages 1
and 2 then have two buckets, which take turns, and stage 3 has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bexp.explorer.dimensions.attention import LIBRARY_ATTENTION
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.model.training import Sharding
from bexp.explorer.model.translation import Section, put_dtype
from bexp.explorer.trainers.document import (
    HALF_NAMES,
    ExportDocument,
    TrainerSettings,
    decided_fields,
    is_launched,
    script_notes,
)
from bexp.explorer.trainers.keys import IN_A_COMMAND, UNKNOWN_FIELD, Batch, Key, Setting, Why, contents, words
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, Trainer, expresses

BUCKET_GRADIENTS = 500_000_000
"""Gradients of a bucket unless `reduce_bucket_size` says otherwise; their memory is allocated at once."""
LEAST_NOTED = 50_000_000
"""Gradients of a bucket on one device below which its memory is not noted: 0.1 GiB."""
GIB = 2**30


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the JSON."""
    header = (*settings.header, *script_notes(settings), *exchange_notes(settings))
    engine = _engine(settings)
    values: dict[str, Any] = {
        "_bexp": header,
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        **({} if settings.grad_accum_steps is None else {"gradient_accumulation_steps": settings.grad_accum_steps}),
        "zero_optimization": engine.pop("zero_optimization"),
        **_precision(settings),
        **engine,
    }
    return ExportDocument(
        json.dumps(decided_fields(settings, values), indent=2, allow_nan=False) + "\n", "application/json", header
    )


def _engine(settings: TrainerSettings) -> dict[str, Any]:
    """Return the stage of ZeRO, and what the person's JSON says of matters that are not explored."""
    kept = _kept(settings)
    stage: dict[str, Any] = {**kept.pop("zero_optimization", {}), "stage": settings.sharding.level}
    if settings.sharding is not Sharding.NONE:
        stage["overlap_comm"] = True
    return {"zero_optimization": stage, **kept}


def uses_deepspeed(settings: TrainerSettings) -> bool:
    """Return whether an export of a trainer that has FSDP as well shards by DeepSpeed.

    It does if the person's file does; a kept configuration of `accelerate launch` says it elsewhere.
    """
    asks, shards = DEEPSPEED.name in settings.request.get("kept", {}), settings.sharding is not Sharding.NONE
    return asks and (shards or settings.widens_shards)


def embedded(settings: TrainerSettings) -> dict[str, Any] | None:
    """Return the JSON for the key `deepspeed` of another trainer's file, which fills in what is `auto`."""
    if not uses_deepspeed(settings) or is_launched(settings):
        return None
    automatic = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    return {**automatic, "bf16": {"enabled": "auto"}, **_engine(settings)}


DEEPSPEED_KEY = Key(Setting.DEEPSPEED, contents("DeepSpeed's JSON"), embedded)
"""The key `deepspeed` of the files of other trainers."""


def _kept(settings: TrainerSettings) -> dict[str, Any]:
    """Return what a person's JSON says beside the exploration; its optimizer only if that was measured."""
    kept = dict(settings.request.get("kept", {}).get(DEEPSPEED.name, {}))
    named = str((kept.get("optimizer") or {}).get("type")).lower()
    if _OPTIMIZERS.get(named) != settings.optimizer:
        kept.pop("optimizer", None)
    return kept


def _precision(settings: TrainerSettings) -> dict[str, Any]:
    """Return the section of the number formats: half precision with master weights, or autocast of any weights."""
    if settings.has_autocast:
        return {"torch_autocast": {"enabled": True, "dtype": settings.dtype.value}}
    return {HALF_NAMES[settings.dtype]: {"enabled": True}} if settings.dtype in HALF_NAMES else {}


def exchange_notes(settings: TrainerSettings) -> list[str]:
    """Return notes on exchanges of DeepSpeed at other times than was measured, and on the memory of its buckets."""
    if settings.num_devices == 1:
        return []
    if settings.sharding is Sharding.NONE:
        lines = [
            "communication: without ZeRO, DeepSpeed reduces gradients when backward has ended, and nothing hides it; "
            "the measured step reduces them while backward goes on"
        ]
        if settings.target_name == TRANSFORMERS:
            lines.append(
                "memory: the measured step holds gradients twice, as DistributedDataParallel does; DeepSpeed holds "
                "them once, and a bucket of up to 500,000,000 of them"
            )
        return lines
    gradients = _gradients_of(_kept(settings).get("zero_optimization", {}), settings.request["hf_config"])
    buckets = _buckets(settings.sharding.level, settings.dtype.itemsize, gradients)
    lines = [f"{buckets}; a smaller reduce_bucket_size takes less"]
    if settings.sharding is not Sharding.ZERO3:
        lines.append(
            "communication: DeepSpeed gathers parameters after the optimizer, where nothing hides it; the measured "
            "step gathers them while forward goes on"
        )
    return lines


def _buckets(stage: int, itemsize: int, gradients: int) -> str:
    """Return a note on the memory of the buckets of a stage, whose gradients have `itemsize` bytes each."""
    number = 1 if stage == Sharding.ZERO3.level else 2
    size = number * gradients * itemsize / GIB
    buckets = f"memory: DeepSpeed's buckets of gradients ({number} x {gradients:,})"
    return f"{buckets} take {size:.1f} GiB more than was measured"


_STAGES = ("none", "zero1", "zero2", "zero3")
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd"}
_HARMLESS = words(
    """
    steps_per_print wall_clock_breakdown dump_state checkpoint memory_breakdown scheduler seed
    gradient_clipping prescale_gradients gradient_predivide_factor communication_data_type
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer comms_config
    disable_allgather timers activation_checkpointing use_data_before_expert_parallel_ sparse_gradients
    autotuning
    """
)
"""Values of the optimizer, files, and how gradients are gathered."""
_RECORDS = words("tensorboard wandb csv_monitor comet flops_profiler comms_logger monitor_config")
"""Where records go, with names of people and of places, which are not stored."""
_HARMLESS_OF_ZERO = words(
    """
    contiguous_gradients overlap_comm reduce_scatter reduce_bucket_size allgather_partitions
    allgather_bucket_size sub_group_size round_robin_gradients stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save load_from_fp32_weights elastic_checkpoint ignore_unused_parameters
    legacy_stage1 stage3_module_granularity_threshold prefetch_bucket_size param_persistence_threshold
    max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold
    """
)
"""Sizes of buffers, and files."""
OFFLOADING = f"{Why.OFFLOADING}: say device: none, or {IN_A_COMMAND}"
"""Why offloading of parameters or of the optimizer is refused."""
_REFUSED = {
    "amp": "amp of Apex is not supported: use bf16",
    "pipeline": "pipeline parallelism is not supported",
    "tensor_parallel": "tensor parallelism is not supported",
    "sequence_parallel_size": "say context_parallel instead",
    "aio": OFFLOADING,
    "compression_training": "compressed training is not supported",
    "sparse_attention": "sparse attention is not supported",
    "curriculum_learning": "sequences of changing length are not supported",
    "data_efficiency": "sequences of changing length are not supported",
    "progressive_layer_drop": "layers that are dropped are not supported",
    "elasticity": "batches of changing size are not supported",
}


def read_config(config: Section, devices: int, other: Batch | None) -> Batch | None:
    """Read DeepSpeed's JSON; where it says `auto`, the batch of the `other` file counts."""
    translation = config.translation
    config.refuse_where_set(_REFUSED)
    _read_batch(config, devices, other)
    zero = config.section("zero_optimization")
    stage = zero.integer("stage", 0, largest=3) or 0
    for key in ("offload_optimizer", "offload_param"):
        if zero.section(key).get("device", "none") not in (None, "none"):
            zero.refuse(key, OFFLOADING)
    for key in ("cpu_offload", "cpu_offload_params"):  # their names before 0.3
        if zero.get(key) not in (None, False):
            zero.refuse(key, OFFLOADING)
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if zero.get(key) not in (None, False):
            zero.refuse(key, "what ZeRO++ sends in fewer bits is not measured: say false")
    if zero.get("mics_shard_size", -1) not in (None, -1):
        zero.refuse("mics_shard_size", f"MiCS: {Why.HYBRID}: say -1")
    if zero.get("zero_hpz_partition_size", 1) not in (None, 1):
        zero.refuse("zero_hpz_partition_size", f"ZeRO++: {Why.HYBRID}: say 1")
    translation.put(("training", "sharding"), _STAGES[stage], zero.at("stage"))
    _read_formats(config, stage)
    gradients = _gradients_of(zero.values, translation.get("hf_config"))
    if stage and devices == 1 and gradients >= LEAST_NOTED:
        translation.notes.append(f"{_buckets(stage, 2, gradients)}; stage 0, which an export says, has none")
    if stage and devices > 1 and not zero.get("overlap_comm", stage == Sharding.ZERO3.level):
        translation.notes.append(
            f"{'.'.join(map(str, config.location))}: is measured with overlap_comm: true, which hides exchanges behind "
            "computation: say so in DeepSpeed's JSON, else the run is slower than its answer"
        )
    zero.ignore(_HARMLESS_OF_ZERO)
    zero.refuse_unread(UNKNOWN_FIELD)
    optimizer = config.section("optimizer")
    if optimizer.get("type") is not None:
        lowered = Section(translation, {"type": str(optimizer.values["type"]).lower()}, optimizer.location)
        name = lowered.choice("type", _OPTIMIZERS, "adamw")
        translation.put(("training", "optimizer", "name"), name, optimizer.at("type"))
    config.ignore(_HARMLESS | _RECORDS | {key for key in config.values if key.startswith("_")})
    config.refuse_unread(UNKNOWN_FIELD)
    translation.ignored += [config.at(key) for key in config.values if key in _RECORDS]
    kept = {key: value for key, value in config.values.items() if key in _HARMLESS | {"optimizer", "data_types"}}
    if of_zero := {key: value for key, value in zero.values.items() if key in _HARMLESS_OF_ZERO}:
        kept["zero_optimization"] = of_zero
    translation.put(("kept", DEEPSPEED.name), kept)
    return other


def _gradients_of(zero: Mapping[str, Any], config: Mapping[str, Any] | None) -> int:
    """Return the gradients of a bucket. The Trainer sets `auto` to the square of the width of a config.json."""
    size = zero.get("reduce_bucket_size")
    if size == "auto" and isinstance(width := (config or {}).get("hidden_size"), int):
        return width * width
    return int(size) if isinstance(size, int | float) else BUCKET_GRADIENTS


def _read_batch(config: Section, devices: int, other: Batch | None) -> None:
    """Set the batch. DeepSpeed derives it, or one of its factors, from the others; `auto` leaves it to the Trainer."""
    translation = config.translation
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, whole = (None if config.get(key) == "auto" else config.integer(key, largest=1 << 20) for key in keys)
    if other is not None:
        for key, value, stated in zip(keys, (micro, steps), other, strict=False):
            if value not in (None, stated):
                config.refuse(key, f"contradicts the trainer's own, which is {stated}: say auto")
            elif value is not None:
                translation.notes.append(
                    f"{'.'.join(map(str, config.at(key)))}: say auto, because the answer may be another than {value}"
                )
        micro, steps = other
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


_FLOAT32 = ("fp32", "float32", "float", "torch.float32")
_OTHER_FORMATS = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")


def _read_formats(config: Section, stage: int) -> None:
    """Set the dtype of parameters, with float32 master weights; with `auto`, the Trainer's `bf16` decides.

    The reference layers have master weights anyway. Adapters are measured in float32, which takes the same bytes.
    """
    translation, brain, half = config.translation, config.section("bf16"), config.section("fp16")
    on = [section.get("enabled", False) for section in (brain, half)]
    fills = translation.get("training", "precision") == "autocast"
    if fills and on[1] is not True and (on[0] == "auto" or "bf16" not in config):
        on[0] = True
    for section in (brain, half):
        if section.get("enabled", False) is not False:
            section.refuse_where_set(dict.fromkeys(_OTHER_FORMATS, f"{Why.OTHER_WEIGHTS}: remove it"))
        section.ignore(section.values)
    config.ignore({"data_types"})
    sums, is_half = config.section("data_types"), any(each in (True, "auto") for each in on)
    if stage and is_half and sums.get("grad_accum_dtype") in _FLOAT32:  # without a stage it is DeepSpeed's default
        sums.refuse("grad_accum_dtype", "sums of gradients are measured in the format of the weights: remove it")
    if on[0] is not True and on[1] is not True:
        return
    name, section = ("bfloat16", brain) if on[0] is True else ("float16", half)
    if on[0] is True and on[1] is True:
        half.refuse("enabled", "contradicts bf16")
    has_master = isinstance(translation.get("hf_config"), Mapping) and not translation.get("training", "lora")
    translation.put(("training", "precision"), "master" if has_master else "pure", section.at("enabled"))
    put_dtype(translation, name, section.at("enabled"))


DEEPSPEED = Trainer(
    name="deepspeed",
    title="DeepSpeed",
    formats={"deepspeed": render},
    side_file=("deepspeed", read_config),
    expresses=expresses(attention=LIBRARY_ATTENTION, experts=LIBRARY_EXPERTS, sharding=Sharding),
    targets=LIBRARY_RUNS_IT,
    precisions=("master", "autocast"),
)
