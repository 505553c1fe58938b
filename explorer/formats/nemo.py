"""The YAML of NeMo's `megatron_*_config.yaml` (NeMo 1.x), put into the words of Megatron's arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bexp.explorer.formats.megatron import translate_arguments
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.translation import Location, Section, Translation
from bexp.explorer.trainers.keys import because

MARKS = frozenset(
    {
        *("encoder_seq_length", "mcore_gpt", "megatron_amp_O2", "global_batch_size", "tensor_model_parallel_size"),
        *("activations_checkpoint_granularity", "activations_checkpoint_method", "activations_checkpoint_num_layers"),
    }
)
"""A model section with any of these keys is one of NeMo's."""

TOP_KEYS = frozenset({"model", "trainer", "name", "restore_from_path", "exp_manager", "hydra", "defaults", "run"})
"""The keys of a NeMo document. None but `model` and `trainer` changes a training step."""

RENAMED = {
    "encoder_seq_length": "seq_length",
    "rotary_percentage": "rotary_percent",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "num_moe_experts": "num_experts",
    "override_vocab_size": "vocab_size",
}
NORMS = {
    **dict.fromkeys(("layernorm", "layernorm1p", "low_precision_layernorm"), "LayerNorm"),
    **dict.fromkeys(("rmsnorm", "low_precision_rmsnorm"), "RMSNorm"),
}
PRECISIONS = dict.fromkeys(("bf16", "bf16-mixed", "bf16-true"), "bf16") | {
    **dict.fromkeys(("16", "16-mixed", "16-true"), "fp16"),
    **dict.fromkeys(("32", "32-true"), None),
}
SHARDED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
OPTIMIZERS = {**dict.fromkeys(("fused_adam", "adam", "adamw", *SHARDED_OPTIMIZERS), "adam"), "sgd": "sgd"}

IGNORED = because(
    {
        "data, and sections that are read by themselves": "tokenizer data optim precision",
        "how NeMo computes the same, values, and files": (
            "restore_from_path nsys_profile gc_interval dist_ckpt_format dist_ckpt_load_strictness "
            "dist_ckpt_parallel_save dist_ckpt_parallel_load dist_ckpt_torch_dist_multiproc "
            "dist_ckpt_assume_constant_structure dist_ckpt_load_on_device dist_ckpt_parallel_dist_opt "
            "gradient_as_bucket_view native_amp_init_scale native_amp_growth_interval grad_div_ar_fusion "
            "grad_allreduce_chunk_size_mb async_grad_allreduce sync_batch_comm nccl_communicator_config_path "
            "apex_transformer_log_level batch_p2p_comm overlap_p2p_comm fp32_residual_connection fp16_lm_cross_entropy "
            "use_cpu_initialization onnx_safe memory_efficient_layer_norm do_layer_norm_weight_decay pre_process "
            "post_process persist_layer_norm bias_activation_fusion bias_dropout_add_fusion masked_softmax_fusion "
            "get_attention_mask_from_fusion apply_rope_fusion use_emha target gradient_accumulation_fusion "
            "transformer_engine mcore_gpt megatron_amp_O2 tp_comm_atomic_ag fp8_margin fp8_interval "
            "fp8_amax_history_len fp8_amax_compute_algo fp8_e4m3 fp8_hybrid reduce_amax use_te_rng_tracker "
            "ub_tp_comm_overlap ub_tp_comm_overlap_cfg normalize_attention_scores fp16_enabled hidden_act "
            "use_scaled_init_method attention_type resume_from_checkpoint "
            "num_micro_batches_with_partial_activation_checkpoints activations_checkpoint_layers_per_pipeline "
            "pipeline_model_parallel_split_rank defer_embedding_wgrad_compute wgrad_deferral_limit "
            "seq_len_interpolation_factor barrier_with_L1_time fsdp_sharding_strategy fsdp_grad_reduce_dtype"
        ),
    }
)
REFUSED = {
    "fsdp": "FSDP of NeMo is not read: say training.sharding",
    "headscale": "scaled heads are not supported",
    "mcore_customization_config": "layers of a code of their own are not supported",
    "peft": "adapters are read from training.lora only, for target transformers",
    "vision": "exploration is limited to language models",
}
TRAINER_IGNORED = frozenset(
    {
        *("accelerator", "logger", "enable_checkpointing", "use_distributed_sampler", "max_epochs", "max_steps"),
        *("max_time", "log_every_n_steps", "val_check_interval", "limit_val_batches", "limit_test_batches"),
        *("limit_train_batches", "gradient_clip_val", "benchmark", "enable_model_summary", "num_sanity_val_steps"),
        *("replace_sampler_ddp", "enable_progress_bar", "check_val_every_n_epoch", "reload_dataloaders_every_n_epochs"),
    }
)


@dataclass
class _Renamed(Section):
    """NeMo's fields under the names of Megatron's arguments, each with its location in the document."""

    names: dict[str, str] = field(default_factory=dict)

    def at(self, key: str) -> Location:
        """Return the location of the field that became the argument `key`."""
        return (*self.location, self.names.get(key, key))


def is_nemo(document: Mapping[str, Any]) -> bool:
    """Return whether a document has the model of a NeMo YAML."""
    model = document.get("model")
    return isinstance(model, Mapping) and bool(MARKS & model.keys())


def translate_nemo(
    document: Mapping[str, Any], translation: Translation, given: Mapping[str, Any], stated: Mapping[str, Any]
) -> None:
    """Set the request of a NeMo YAML; see `translate_arguments` for `given` and `stated`."""
    top = translation.section(document, ())
    model, trainer = top.section("model"), top.section("trainer")
    model.refuse_where_set(REFUSED)
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in model.values.items():
        if key not in IGNORED and key not in REFUSED and key not in CONVERTED:
            name = RENAMED.get(key, key)
            values[name] = _resolve(model, key, value)
            names[name] = key
    _convert(model, values, names)
    _take_optimizer(model.section("optim"), values)
    _take_trainer(trainer, model, values)
    if model.values.get("use_flash_attention") is not None:
        translation.put(("flash_attention",), model.boolean("use_flash_attention"), model.at("use_flash_attention"))
    if not model.boolean("megatron_amp_O2") and (values.get("bf16") or values.get("fp16")):
        translation.notes.append(
            "megatron_amp_O2 is off in the file; parameters are measured in the dtype of precision, with float32 "
            "master weights"
        )
    translate_arguments(_Renamed(translation, values, model.location, names=names), given, stated)


CONVERTED = frozenset(
    {
        *("bias", "normalization", "activation", "share_embeddings_and_output_weights", "transformer_block_type"),
        *("use_flash_attention", "num_query_groups", "ffn_hidden_size"),
    }
)
"""Fields whose values Megatron's arguments write in another way."""


def _resolve(model: Section, key: str, value: Any) -> Any:
    """Return the value of an interpolation of one field of the model; refuse any other."""
    if not isinstance(value, str) or not ("${" in value or value == "???"):
        return value
    named = re.fullmatch(r"\$\{(?:\.|model\.)(\w{1,60})\}", value)
    field = model.values.get(named[1]) if named else None
    if field is None or isinstance(field, str):
        model.refuse(key, f"{shortened(value)} cannot be resolved: write the value out")
        return None
    return field


def _convert(model: Section, values: dict[str, Any], names: dict[str, str]) -> None:
    values["disable_bias_linear"] = not model.boolean("bias", True)
    values["untie_embeddings_and_output_weights"] = not model.boolean("share_embeddings_and_output_weights", True)
    values["normalization"] = model.choice("normalization", NORMS, "layernorm")
    names |= {
        "disable_bias_linear": "bias",
        "untie_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    }
    activation = model.get("activation", "gelu")
    values["activation"] = activation.removeprefix("fast-") if isinstance(activation, str) else activation
    model.choice("transformer_block_type", {"pre_ln": None}, "pre_ln")
    width = _resolve(model, "ffn_hidden_size", model.get("ffn_hidden_size"))
    hidden = model.integer("hidden_size")
    values["ffn_hidden_size"] = 4 * hidden if width is None and hidden else width
    if (groups := model.get("num_query_groups")) is not None:
        values |= {"group_query_attention": True, "num_query_groups": _resolve(model, "num_query_groups", groups)}


def _take_optimizer(optimizer: Section, values: dict[str, Any]) -> None:
    if optimizer.get("name") is None:
        return
    values["optimizer"] = optimizer.choice("name", OPTIMIZERS, "fused_adam")
    values["use_distributed_optimizer"] = optimizer.values["name"] in SHARDED_OPTIMIZERS


def _take_trainer(trainer: Section, model: Section, values: dict[str, Any]) -> None:
    """Read the devices and the precision of Lightning's trainer; refuse others that change a training step."""
    section = model if model.values.get("precision") is not None and "precision" not in trainer else trainer
    precision = section.get("precision", "bf16")
    if str(precision) not in PRECISIONS:
        supported = ", ".join(PRECISIONS)
        section.refuse("precision", f"{shortened(repr(precision))} is not supported; supported: {supported}")
    elif flag := PRECISIONS[str(precision)]:
        values[flag] = True
    devices, nodes = trainer.integer("devices", 1, largest=4096), trainer.integer("num_nodes", 1, largest=4096)
    if devices and nodes and trainer.values:
        trainer.translation.put(("num_devices",), devices * nodes, trainer.at("devices"))
    if trainer.get("accumulate_grad_batches", 1) != 1:
        trainer.refuse("accumulate_grad_batches", "must be 1: global_batch_size decides the accumulation")
    trainer.ignore(TRAINER_IGNORED)
    trainer.refuse_unread("is not a known field of NeMo's trainer; remove it if it changes no training step")
