"""The keys of a torchtune recipe's YAML, dotted where they are nested. Names as of torchtune 0.6."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.training import Sharding
from bexp.explorer.trainers.keys import (
    Formats,
    Key,
    Setting,
    TrainerFile,
    Why,
    because,
    flag,
    if_on,
    must_be,
    names,
    number,
    one_of,
    words,
)
from bexp.explorer.trainers.trainer import FRACTIONAL_ALPHA, LORA, OTHER_LIBRARIES, Trainer, expresses

_MODULES = {"output_proj": "o_proj"}
"""Torchtune's modules whose names in transformers differ, by those names."""
_OPTIMIZERS = {
    "torch.optim.adamw": "adamw_torch_fused",
    "torch.optim.sgd": "sgd",
    "bitsandbytes.optim.adamw8bit": "adamw_bnb_8bit",
}
_LOSSES = {
    "torchtune.modules.loss.cewithchunkedoutputloss": "chunked",
    "torchtune.modules.loss.linearcrossentropyloss": "chunked",
    "torch.nn.crossentropyloss": "library",
}


def _has_adapters(value: Any) -> bool:
    name = str(value).rpartition(".")[2]
    if name.startswith("qlora"):
        raise ValueError("weights in 4 bits by torchao are not measured; those of bitsandbytes are")
    return name.startswith("lora")


def _modules(value: Any) -> Any:
    listed = names(value)
    return [_MODULES.get(str(name), str(name)) for name in listed] if isinstance(listed, list) else listed


def _formats(said: Formats) -> tuple[str, str | None]:
    """Return the formats: all weights have that of `dtype`."""
    return said.weights or "bfloat16", "pure"


FILE = TrainerFile(
    model="checkpointer.checkpoint_dir",
    keys={
        "checkpointer.checkpoint_dir": Key(Setting.MODEL),
        "model._component_": Key(Setting.ADAPTERS, _has_adapters),
        "model.lora_rank": Key(Setting.R),
        "model.lora_alpha": Key(Setting.ALPHA),
        "model.lora_dropout": Key(Setting.DROPOUT),
        "model.lora_attn_modules": Key(Setting.MODULES, _modules),
        "model.apply_lora_to_mlp": Key(Setting.MODULES, if_on(["gate_proj", "up_proj", "down_proj"])),
        "model.apply_lora_to_output": Key(Setting.MODULES, if_on(["lm_head"])),
        "model.use_dora": Key(Setting.DORA, flag),
        "tokenizer.max_seq_len": Key(Setting.SEQ_LENGTH),
        "dataset.packed": Key(Setting.PACKING, flag),
        "batch_size": Key(Setting.MICRO_BATCH_SIZE, number),
        "gradient_accumulation_steps": Key(Setting.STEPS, number),
        "optimizer._component_": Key(Setting.OPTIMIZER, one_of(_OPTIMIZERS)),
        "loss._component_": Key(Setting.LOSS, one_of(_LOSSES)),
        "dtype": Key(Setting.WEIGHTS, one_of({"bf16": "bfloat16", "fp32": "float32"})),
        "compile": Key(Setting.COMPILE, flag),
        "enable_activation_checkpointing": Key(Setting.RECOMPUTATION, flag),
        "ac_mode": must_be("full", reason="selective recomputation is not measured for torchtune"),
    },
    defaults={Setting.OPTIMIZER: "adamw_torch_fused", Setting.LOSS: "chunked"},
    formats=_formats,
    refused=because(
        {
            Why.OTHER_WEIGHTS: "model.quantize_base quantizer.*",
            Why.OFFLOADING: "enable_activation_offloading fsdp_cpu_offload",
            "an optimizer that steps in the backward pass is not measured": "optimizer_in_bwd",
            Why.PARALLEL: "tensor_parallel_dim context_parallel_dim tensor_parallel_plan.*",
            Why.OTHER_TRAINING: "teacher_model.* kd_loss.* reward_checkpointer.* ref_checkpointer.* policy_model.*",
        }
    ),
    harmless=words(
        """
        output_dir tokenizer.* checkpointer.* resume_from_checkpoint save_adapter_weights_only dataset.* seed shuffle
        epochs optimizer.* lr_scheduler.* max_steps_per_epoch clip_grad_norm metric_logger.* log_* device profiler.*
        loss.* custom_sharded_layers cudnn_deterministic_mode dataset_val.* run_val_every_n_steps batch_size_val
        collate_fn
        """
    ),
    is_nested=True,
    shards=True,
    note="torchtune has layers of its own and no export: set batch_size, gradient_accumulation_steps, compile and "
    "enable_activation_checkpointing as the answer says; its tokens/s and memory are those of transformers' layers",
)


TORCHTUNE = Trainer(
    name="torchtune",
    title="torchtune",
    file=FILE,
    expresses=expresses(
        sharding={Sharding.NONE, Sharding.ZERO3},
        loss={"library", "chunked"},
        execution={Execution.EAGER, Execution.COMPILE},
        optimizer={OTHER_LIBRARIES},
        adapters={LORA, FRACTIONAL_ALPHA},
        batching={"padded", "packed"},
    ),
    precisions=("pure",),
)
