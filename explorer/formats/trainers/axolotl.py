"""The keys of an Axolotl YAML. Names and defaults as of Axolotl 0.21."""

from __future__ import annotations

from typing import Any

from bexp.explorer.formats.trainers.library_arguments import LORA
from bexp.explorer.formats.trainers.trainer_file import (
    KERNELS,
    OFFLOADING,
    OTHER_ADAPTERS,
    OTHER_LOSS,
    OTHER_MODEL,
    OTHER_OPTIMIZER,
    OTHER_TRAINING,
    OTHER_WEIGHTS,
    PARALLEL,
    PART_OF_WEIGHTS,
    QLORA,
    SHARDING,
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


def _half(value: Any) -> bool:
    return value in ("auto", "full") or flag(value)


def _recomputes(value: Any) -> bool:
    if isinstance(value, str) and value.startswith("offload"):
        raise ValueError(f"{OFFLOADING}: say true")
    return flag(value)


def _formats(said: Formats) -> tuple[str, str | None]:
    """It makes the weights in half precision, and may keep parts of them in float32, if it trains them all."""
    if not said.half:
        return "float32", "pure"
    return "bfloat16", "pure" if said.has_adapters else None


AXOLOTL = TrainerFile(
    model="base_model",
    settings={
        **LORA,
        "base_model": (Setting.MODEL, same),
        "micro_batch_size": (Setting.MICRO_BATCH_SIZE, number),
        "gradient_accumulation_steps": (Setting.STEPS, number),
        "batch_size": (Setting.DEVICE_BATCH, number),
        "world_size": (Setting.DEVICES, number),
        "sequence_len": (Setting.SEQ_LENGTH, same),
        "optimizer": (Setting.OPTIMIZER, same),
        "bf16": (Setting.HALF, _half),
        "bfloat16": (Setting.HALF, _half),
        "adapter": (Setting.ADAPTERS, one_of({"lora": True, "qlora": QLORA})),
        "lora_target_linear": (Setting.MODULES, if_on("all-linear")),
        "peft_use_dora": (Setting.DORA, flag),
        "peft_use_rslora": (Setting.RSLORA, flag),
        "sample_packing": (Setting.PACKING, flag),
        "pad_to_sequence_len": (Setting.FULL_ROWS, flag),
        "group_by_length": (Setting.ORDER, flag),
        "torch_compile": (Setting.COMPILE, lambda value: value != "auto" and flag(value)),
        "gradient_checkpointing": (Setting.RECOMPUTATION, _recomputes),
        "gradient_checkpointing_kwargs": (Setting.RECOMPUTATION_DETAILS, same),
        "attn_implementation": (Setting.ATTENTION, same),
        "flash_attention": (Setting.ATTENTION, if_on("flash_attention_2")),
        "sdp_attention": (Setting.ATTENTION, if_on("sdpa")),
        "flex_attention": (Setting.ATTENTION, if_on("flex_attention")),
        "eager_attention": (Setting.ATTENTION, if_on("eager")),
        "experts_implementation": (Setting.EXPERTS, same),
        "nf4_backend": must_be("bitsandbytes", reason=OTHER_WEIGHTS),
    },
    defaults={
        Setting.MICRO_BATCH_SIZE: 1,
        Setting.SEQ_LENGTH: 512,
        Setting.OPTIMIZER: "adamw_torch_fused",
        Setting.HALF: True,
    },
    formats=_formats,
    refused=because(
        {
            SHARDING: "deepspeed deepcompile fsdp fsdp_config",
            PARALLEL: (
                "sequence_parallel_degree context_parallel_size context_parallel tensor_parallel_size dp_shard_size "
                "expert_parallel_size"
            ),
            OFFLOADING: "activation_offloading layer_offloading ple_cpu_offload",
            OTHER_TRAINING: (
                "rl trl reward_model process_reward_model diffusion_lm diffusion ebft kd_trainer processor_type "
                "is_multimodal trainer_cls use_pose"
            ),
            OTHER_WEIGHTS: (
                "fp16 float16 fp8 qat quantization gptq bnb_config_kwargs use_onebitllms model_quantization_config "
                "quantize_moe_experts fp32_norms embeddings_skip_upcast"
            ),
            OTHER_ADAPTERS: (
                "lora_model_dir lora_rank_pattern peft_layers_to_transform peft_layer_replication peft "
                "peft_trainable_token_indices mixlora_* mora relora lora_fp32_gradients"
            ),
            "adapters are measured in float32, which is the default: remove it": "peft_autocast_adapter_dtype",
            PART_OF_WEIGHTS: "unfrozen_parameters freeze_mm_modules lisa_n_layers spectrum_*",
            OTHER_OPTIMIZER: "torchdistx_path optim_target_modules",
            KERNELS: (
                "xformers_attention sage_attention s2_attention flash_attn_* fused_attn_kernel liger_* "
                "large_head_attention lora_*_kernel use_kernels tiled_mlp use_scattermoe use_sonicmoe "
                "llama4_linearized_experts expert_backend unsloth_* gemma4_hybrid_attn_impl"
            ),
            OTHER_LOSS: (
                "cut_cross_entropy chunked_cross_entropy use_eaft use_dft dft_* neftune_noise_alpha "
                "noisy_embedding_alpha"
            ),
            "what plugins change is not measured: remove them": "plugins",
            OTHER_MODEL: "overrides_of_model_config overrides_of_model_kwargs rope_scaling scaling_softmax",
            "this recomputation is not measured; gradient_checkpointing is explored": "selective_checkpointing",
            "rows without padding are measured for sample_packing alone": "batch_flattening",
            "an exploration finds the size: remove it": "auto_find_batch_size",
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
        warmup_* weight_decay adam_* max_grad_norm jagged_restart_* optim_args tf32 seed full_determinism debug device
        local_rank ddp* dataloader_* remove_unused_columns resume_from_checkpoint auto_resume_from_checkpoints
        early_stopping_patience load_best_model_at_end loss_watchdog_* metric_for_best_model greater_is_better gc_*
        torch_empty_cache_steps do_*_eval bench_* generate_samples num_generation_samples generation_* fsdp_version
        profiler_* sync_profiler_* include_t* resize_token_embeddings_to_32x mean_resizing_embeddings lora_on_cpu
        lora_fan_in_fan_out lora_alpha_pattern peft_init_lora_weights merge_* low_cpu_mem_usage pad_to_multiple_of
        sample_packing_* sdpa_varlen multipack_real_batches excess_length_strategy min_sample_len max_prompt_len
        skip_prepare_* curriculum_sampling streaming* accelerator_config torch_compile_* use_ray ray_*
        fix_untrained_tokens balance_labels dynamic_checkpoint export lm_eval_* axolotl_config_path float32
        heads_k_stride ring_attn_func
        """
    ),
)
