"""Axolotl's YAML, in and out. Names and defaults as of Axolotl 0.21.

With `bf16`, Axolotl makes the weights in bfloat16 and computes under autocast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bexp.explorer.dimensions.attention import LIBRARY_ATTENTION, TORCH_CHOICE
from bexp.explorer.dimensions.experts import LIBRARY_EXPERTS
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import LIBRARY_NAMES, MUON
from bexp.explorer.model.training import LINEAR_MODULES
from bexp.explorer.trainers.deepspeed import DEEPSPEED_KEY
from bexp.explorer.trainers.document import WHAT_ELSE, ExportDocument, TrainerSettings, yaml_export
from bexp.explorer.trainers.fsdp import (
    ACCELERATOR_CONFIG,
    FSDP_CONFIG,
    WRAP,
    fsdp_config,
    recomputes_itself,
    sharding_notes,
)
from bexp.explorer.trainers.keys import (
    IN_A_COMMAND,
    QLORA,
    Formats,
    Key,
    Setting,
    TrainerFile,
    Why,
    because,
    fields_of,
    flag,
    if_on,
    key,
    must_be,
    names,
    number,
    one_of,
    turns_on,
    words,
)
from bexp.explorer.trainers.trainer import LIBRARY_RUNS_IT, OTHER_LIBRARIES, SINGLE_PARAMETERS, Trainer, expresses
from bexp.explorer.trainers.trainer import LORA as ADAPTERS
from bexp.explorer.trainers.transformers import LORA, optimizer_arguments


def _half(value: Any) -> bool:
    return value in ("auto", "full") or flag(value)


def _recomputes(value: Any) -> bool:
    if isinstance(value, str) and value.startswith("offload"):
        raise ValueError(f"{Why.OFFLOADING}: say true")
    return flag(value)


def _formats(said: Formats) -> tuple[str, str | None]:
    """Return the formats: weights in half precision, parts of them in float32 if it trains all of them."""
    if not said.half:
        return "float32", "pure"
    return "bfloat16", "pure" if said.has_adapters else None


def _varlen(settings: TrainerSettings) -> bool | None:
    """Return whether to turn on kernels for variable lengths, where a mask of blocks was measured."""
    return False if settings.packs and settings.attention in (None, TORCH_CHOICE) else None


def _real_batches(settings: TrainerSettings) -> bool | None:
    """Return whether packed rows stay apart. Otherwise they are one row, which kernels for variable lengths need."""
    return not settings.has_flash_attention if settings.packs else None


def _groups(settings: TrainerSettings) -> bool | None:
    return None if settings.batching in (None, "packed") else settings.batching == "grouped"


def _modules(value: Any) -> Any:
    """Return the names, or peft's `all-linear`, which Axolotl hands on."""
    return None if value == LINEAR_MODULES else value if isinstance(value, str) else list(value)


def _optimizer(settings: TrainerSettings) -> str | None:
    return None if settings.is_own_code else LIBRARY_NAMES.get(settings.optimizer, settings.optimizer)


def _adapter(settings: TrainerSettings) -> str | None:
    if settings.lora is None:
        return None
    return QLORA if settings.quantization is not None and settings.quantization.bits == 4 else "lora"


def _fsdp_config(settings: TrainerSettings) -> dict[str, Any] | None:
    """Return FSDP's fields; its version stands outside."""
    config = fsdp_config(settings)
    return config and {"auto_wrap_policy": WRAP, **{key: config[key] for key in config if key != "version"}}


KEYS = {
    "base_model": Key(Setting.MODEL),
    "micro_batch_size": key(Setting.MICRO_BATCH_SIZE, number),
    "gradient_accumulation_steps": key(Setting.STEPS, number),
    "batch_size": Key(Setting.DEVICE_BATCH, number),
    "world_size": Key(Setting.DEVICES, number),
    "bf16": Key(Setting.HALF, _half, lambda settings: settings.dtype is DType.BFLOAT16),
    "bfloat16": Key(Setting.HALF, _half),
    "fp16": Key(write=lambda settings: settings.dtype is DType.FLOAT16 or None),
    "optimizer": Key(Setting.OPTIMIZER, write=_optimizer),
    "optim_args": Key(write=optimizer_arguments),
    "sequence_len": key(Setting.SEQ_LENGTH),
    "sample_packing": key(Setting.PACKING, flag),
    # By itself Axolotl drops texts that are longer than a sequence.
    "excess_length_strategy": Key(write=lambda settings: settings.batching and "truncate"),
    "sdpa_varlen": Key(write=_varlen),
    "pad_to_sequence_len": Key(Setting.FULL_ROWS, flag, lambda settings: settings.batching and settings.packs),
    "multipack_real_batches": Key(write=_real_batches),
    "group_by_length": Key(Setting.ORDER, flag, _groups),
    "adapter": Key(Setting.ADAPTERS, one_of({"lora": True, "qlora": QLORA}), _adapter),
    "lora_r": LORA["lora_r"],
    "lora_alpha": LORA["lora_alpha"],
    # Axolotl's kernels of adapters, which it uses by default, are not measured.
    **dict.fromkeys(
        ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
        Key(write=lambda settings: None if settings.lora is None else False),
    ),
    "load_in_4bit": LORA["load_in_4bit"],
    "load_in_8bit": LORA["load_in_8bit"],
    "lora_target_modules": key(Setting.MODULES, names, _modules),
    "lora_target_linear": key(Setting.MODULES, if_on(LINEAR_MODULES), turns_on(LINEAR_MODULES)),
    "lora_dropout": LORA["lora_dropout"],
    "lora_target_parameters": LORA["lora_target_parameters"],
    "lora_modules_to_save": LORA["lora_modules_to_save"],
    "peft_use_dora": key(Setting.DORA, flag),
    "peft_use_rslora": key(Setting.RSLORA, flag),
    "torch_compile": Key(Setting.COMPILE, lambda value: value == "auto" or flag(value), lambda settings: False),
    "gradient_checkpointing": Key(Setting.RECOMPUTATION, _recomputes, recomputes_itself),
    "attn_implementation": key(Setting.ATTENTION),
    "experts_implementation": key(Setting.EXPERTS),
    "gradient_checkpointing_kwargs": Key(
        Setting.RECOMPUTATION_DETAILS,
        write=lambda settings: {"use_reentrant": False} if recomputes_itself(settings) else None,
    ),
    "flash_attention": Key(Setting.ATTENTION, if_on("flash_attention_2")),
    "sdp_attention": Key(Setting.ATTENTION, if_on("sdpa")),
    "flex_attention": Key(Setting.ATTENTION, if_on("flex_attention")),
    "eager_attention": Key(Setting.ATTENTION, if_on("eager")),
    "nf4_backend": must_be("bitsandbytes", reason=Why.OTHER_WEIGHTS),
    "deepspeed": DEEPSPEED_KEY,
    "fsdp_version": Key(Setting.FSDP_VERSION, one_of({"2": 2}), lambda settings: fsdp_config(settings) and 2),
    "fsdp_config": replace(FSDP_CONFIG, write=_fsdp_config),
    "accelerator_config": ACCELERATOR_CONFIG,
    "dp_shard_size": Key(Setting.DEVICES, number),
}
FILE = TrainerFile(
    model="base_model",
    keys=KEYS,
    program=r"(?:.*/)?axolotl(?:\.cli\.train)?",
    defaults={
        Setting.MICRO_BATCH_SIZE: 1,
        Setting.SEQ_LENGTH: 512,
        Setting.OPTIMIZER: "adamw_torch_fused",
        Setting.HALF: True,
        Setting.COMPILE: False,
        Setting.RECOMPUTATION: False,
    },
    formats=_formats,
    fsdp_versions=(2,),
    fsdp_needs_switch=False,
    widens_fsdp=False,
    refused=because(
        {
            "DeepSpeed's own compiler is not measured: remove it": "deepcompile",
            f"{Why.HYBRID}: leave it out": "dp_replicate_size",
            Why.PARALLEL: (
                "sequence_parallel_degree context_parallel_size context_parallel tensor_parallel_size "
                "expert_parallel_size"
            ),
            Why.OFFLOADING: "activation_offloading layer_offloading ple_cpu_offload",
            Why.OTHER_TRAINING: (
                "rl trl reward_model process_reward_model diffusion_lm diffusion ebft kd_trainer processor_type "
                "is_multimodal trainer_cls use_pose"
            ),
            Why.OTHER_WEIGHTS: (
                "fp16 float16 fp8 qat quantization gptq bnb_config_kwargs use_onebitllms model_quantization_config "
                "quantize_moe_experts fp32_norms embeddings_skip_upcast"
            ),
            Why.OTHER_ADAPTERS: (
                "lora_model_dir lora_rank_pattern peft_layers_to_transform peft_layer_replication peft "
                "peft_trainable_token_indices mixlora_* mora relora lora_fp32_gradients"
            ),
            "adapters are measured in float32, which is the default: remove it": "peft_autocast_adapter_dtype",
            Why.PART_OF_WEIGHTS: "unfrozen_parameters freeze_mm_modules lisa_n_layers spectrum_*",
            Why.OTHER_OPTIMIZER: "torchdistx_path optim_target_modules",
            Why.KERNELS: (
                "xformers_attention sage_attention s2_attention flash_attn_* fused_attn_kernel liger_* "
                "large_head_attention lora_*_kernel use_kernels tiled_mlp use_scattermoe use_sonicmoe "
                "llama4_linearized_experts expert_backend unsloth_* gemma4_hybrid_attn_impl"
            ),
            Why.OTHER_LOSS: (
                "cut_cross_entropy chunked_cross_entropy use_eaft use_dft dft_* neftune_noise_alpha "
                "noisy_embedding_alpha"
            ),
            f"changes by plugins are not measured: remove them, or {IN_A_COMMAND}": "plugins",
            Why.OTHER_MODEL: "overrides_of_model_config overrides_of_model_kwargs rope_scaling scaling_softmax",
            "this recomputation is not measured; gradient_checkpointing is explored": "selective_checkpointing",
            "rows without padding are measured for sample_packing alone": "batch_flattening",
            "an exploration finds the size: remove it": "auto_find_batch_size",
            "Axolotl shards by fsdp_config alone: remove it": "fsdp",
            Why.SLOWER: "full_determinism torch_empty_cache_steps",
        }
    ),
    harmless=words(
        """
        base_model_config type_of_model model_type tokenizer_* trust_remote_code is_*_derived_model revision_of_model
        cls_model_config special_tokens tokens added_tokens_overrides strict chat_template* default_system_message
        eot_tokens datasets test_datasets dataset_* shuffle_* pretraining_dataset val_set_size train_on_inputs
        output_dir hub_* hf_* push_dataset_to_hub save_* saves_per_epoch logging_* eval_* evals_per_epoch eval*
        wandb_* use_wandb mlflow_* use_mlflow comet_* use_comet use_tensorboard trackio_* use_trackio swanlab_*
        use_swanlab use_otel_metrics otel_* num_epochs max_steps learning_rate lr_* cosine_* embedding_lr* loraplus_*
        warmup_* weight_decay adam_* max_grad_norm jagged_restart_* optim_args tf32 seed debug device
        local_rank ddp* dataloader_* remove_unused_columns resume_from_checkpoint auto_resume_from_checkpoints
        early_stopping_patience load_best_model_at_end loss_watchdog_* metric_for_best_model greater_is_better gc_*
        do_*_eval bench_* generate_samples num_generation_samples generation_*
        fsdp_final_state_dict_type
        profiler_* sync_profiler_* include_t* resize_token_embeddings_to_32x mean_resizing_embeddings lora_on_cpu
        lora_fan_in_fan_out lora_alpha_pattern peft_init_lora_weights merge_* low_cpu_mem_usage pad_to_multiple_of
        sample_packing_* sdpa_varlen multipack_real_batches excess_length_strategy min_sample_len max_prompt_len
        skip_prepare_* curriculum_sampling streaming* torch_compile_* use_ray ray_*
        fix_untrained_tokens balance_labels dynamic_checkpoint export lm_eval_* axolotl_config_path float32
        heads_k_stride ring_attn_func
        """
    ),
)


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the part of a configuration that an exploration decides, as YAML."""
    notes = [f"add base_model, datasets {WHAT_ELSE}", *sharding_notes(settings)]
    if settings.optimizer == MUON:
        notes.append("optimizer: Axolotl's Muon trains no norms and biases, for which the measured one has AdamW")
    notes += _precision_notes(settings)
    return yaml_export(settings, fields_of(KEYS, settings), notes)


def _precision_notes(settings: TrainerSettings) -> list[str]:
    """Return notes on number formats of weights that Axolotl sets otherwise than was measured."""
    if settings.quantization is not None:
        return [
            f"memory: Axolotl casts norms, embeddings and output layer to {settings.dtype}; they were measured in "
            "float32, as peft prepares them, so it needs less"
        ]
    if settings.is_own_code or settings.lora is not None or settings.dtype is DType.FLOAT32:
        return []
    if settings.widens_shards:
        return []
    if settings.precision != "upcast":
        return [f"precision: Axolotl makes the weights in {settings.dtype} and computes under autocast"]
    if settings.training.precision == "upcast":
        return []
    return [
        "memory: Axolotl keeps norms and embeddings in float32 and computes under autocast; its activations were not "
        "measured: explore with --trainer axolotl"
    ]


AXOLOTL = Trainer(
    name="axolotl",
    title="Axolotl",
    formats={"axolotl": render},
    file=FILE,
    expresses=expresses(
        attention=LIBRARY_ATTENTION,
        experts=LIBRARY_EXPERTS,
        optimizer={OTHER_LIBRARIES, MUON},
        adapters={ADAPTERS, SINGLE_PARAMETERS},
    ),
    targets=LIBRARY_RUNS_IT,
    awaits_losses=True,
    has_deepspeed=True,
    halves_shell=True,
    precisions=("upcast", "pure"),  # it makes the weights in half precision, and computes under autocast
    upcast_attention=frozenset({TORCH_CHOICE, "eager"}),
    lists_linear=True,
    allocator="expandable_segments",  # its launcher sets it
)
