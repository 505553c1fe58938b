"""The keys of a torchtune recipe's YAML, dotted where they are nested. Names as of torchtune 0.6."""

from __future__ import annotations

from typing import Any

from bexp.explorer.formats.trainers.trainer_file import (
    OFFLOADING,
    OTHER_TRAINING,
    OTHER_WEIGHTS,
    PARALLEL,
    Formats,
    Setting,
    TrainerFile,
    because,
    flag,
    if_on,
    must_be,
    number,
    one_of,
    same,
    words,
)

_MODULES = {"output_proj": "o_proj"}
"""Names of torchtune's modules that transformers calls otherwise."""
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
    return [_MODULES.get(str(name), str(name)) for name in value] if isinstance(value, list) else value


def _formats(said: Formats) -> tuple[str, str | None]:
    """All weights have the format that `dtype` names."""
    return said.weights or "bfloat16", "pure"


TORCHTUNE = TrainerFile(
    model="checkpointer.checkpoint_dir",
    settings={
        "checkpointer.checkpoint_dir": (Setting.MODEL, same),
        "model._component_": (Setting.ADAPTERS, _has_adapters),
        "model.lora_rank": (Setting.R, same),
        "model.lora_alpha": (Setting.ALPHA, same),
        "model.lora_dropout": (Setting.DROPOUT, same),
        "model.lora_attn_modules": (Setting.MODULES, _modules),
        "model.apply_lora_to_mlp": (Setting.MODULES, if_on(["gate_proj", "up_proj", "down_proj"])),
        "model.apply_lora_to_output": (Setting.MODULES, if_on(["lm_head"])),
        "model.use_dora": (Setting.DORA, flag),
        "tokenizer.max_seq_len": (Setting.SEQ_LENGTH, same),
        "dataset.packed": (Setting.PACKING, flag),
        "batch_size": (Setting.MICRO_BATCH_SIZE, number),
        "gradient_accumulation_steps": (Setting.STEPS, number),
        "optimizer._component_": (Setting.OPTIMIZER, one_of(_OPTIMIZERS)),
        "loss._component_": (Setting.LOSS, one_of(_LOSSES)),
        "dtype": (Setting.WEIGHTS, one_of({"bf16": "bfloat16", "fp32": "float32"})),
        "compile": (Setting.COMPILE, flag),
        "enable_activation_checkpointing": (Setting.RECOMPUTATION, flag),
        "ac_mode": must_be("full", reason="selective recomputation is not measured for torchtune"),
    },
    defaults={Setting.OPTIMIZER: "adamw_torch_fused", Setting.LOSS: "chunked"},
    formats=_formats,
    refused=because(
        {
            OTHER_WEIGHTS: "model.quantize_base quantizer.*",
            OFFLOADING: "enable_activation_offloading fsdp_cpu_offload",
            "an optimizer that steps in the backward pass is not measured": "optimizer_in_bwd",
            PARALLEL: "tensor_parallel_dim context_parallel_dim tensor_parallel_plan.*",
            OTHER_TRAINING: "teacher_model.* kd_loss.* reward_checkpointer.* ref_checkpointer.* policy_model.*",
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
