"""Arguments of Megatron-LM and NeMo that change neither time nor memory of a step noticeably, and that are refused."""

from __future__ import annotations

IGNORED = {
    **dict.fromkeys(
        (
            *("hidden_dropout", "attention_dropout", "ffn_dropout", "weight_decay", "clip_grad", "init_method_std"),
            *("norm_epsilon", "layernorm_epsilon", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "seed"),
            *("apply_layernorm_1p", "init_method_xavier_uniform", "start_weight_decay", "end_weight_decay"),
            *(
                "calculate_per_token_loss",
                "min_lr",
                "override_opt_param_scheduler",
                "use_checkpoint_opt_param_scheduler",
                "min_loss_scale",
            ),
            *("initial_loss_scale", "loss_scale", "loss_scale_window", "hysteresis", "use_mup"),
        ),
        "values of parameters and of the optimizer; dropout, which no exploration runs",
    ),
    **dict.fromkeys(
        (
            *("rotary_base", "rotary_interleaved", "rope_scaling_factor", "use_rope_scaling"),
            *("rotary_seq_len_interpolation_factor", "no_position_embedding", "no_rope_fusion"),
        ),
        "the angles of rotary embeddings",
    ),
    **dict.fromkeys(
        (
            *("use_flash_attn", "attention_backend", "use_mcore_models", "transformer_impl", "spec"),
            "sequence_parallel",
            *("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "cross_entropy_loss_fusion"),
            *("cross_entropy_fusion_impl", "no_masked_softmax_fusion", "no_bias_gelu_fusion", "no_bias_swiglu_fusion"),
            *("no_bias_dropout_fusion", "no_persist_layer_norm", "no_gradient_accumulation_fusion", "openai_gelu"),
            *("accumulate_allreduce_grads_in_fp32", "overlap_grad_reduce", "overlap_param_gather", "enable_cuda_graph"),
            *("tp_comm_overlap", "no_async_tensor_model_parallel_allreduce", "use_legacy_models", "deterministic_mode"),
            *("ddp_bucket_size", "ddp_average_in_collective", "align_param_gather", "manual_gc", "manual_gc_interval"),
        ),
        "how Megatron computes the same; here the kernel is explored",
    ),
    **dict.fromkeys(
        (
            *("moe_grouped_gemm", "moe_token_dispatcher_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff"),
            *("moe_z_loss_coeff", "moe_router_dtype", "moe_permute_fusion", "moe_router_score_function"),
            *("moe_shared_expert_overlap", "moe_per_layer_logging", "moe_router_topk_scaling_factor"),
            "moe_layer_recompute",
            *("moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_input_jitter_eps"),
            *("moe_enable_deepep", "moe_router_fusion"),
        ),
        "the router's losses, and how Megatron computes the experts",
    ),
    **dict.fromkeys(
        (
            *("empty_unused_memory_level", "no_mmap_bin_files"),
            *("train_iters", "train_samples", "exit_interval", "exit_duration_in_mins", "exit_signal_handler"),
            *("split", "vocab_file", "merge_file", "mock_data", "num_workers", "mmap_bin_files"),
            "num_dataset_builder_threads",
            *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "no_create_attention_mask_in_dataloader"),
            *("dataloader_type", "decoder_seq_length", "bert_load", "use_dist_ckpt", "async_save", "finetune"),
            *("local_rank", "distributed_backend", "distributed_timeout_minutes", "rampup_batch_size", "profile"),
        ),
        "data, the number of steps, and files",
    ),
}
"""Arguments by name, and what they are."""

IGNORED_PREFIXES = (
    *("lr", "log_", "save", "load", "no_load_", "no_save_", "eval_", "ckpt_", "tensorboard_", "wandb_", "one_logger_"),
    *(
        "tokenizer_",
        "tiktoken_",
        "decoupled_",
        "data_path",
        "data_cache",
        "data_args",
        "train_data",
        "valid_data",
        "test_data",
        "per_split_data",
    ),
    *("timing_", "rerun_", "check_for_", "profile_", "distributed_timeout", "dist_ckpt", "auto_detect_ckpt"),
)
"""Beginnings of names that stand for learning rates, records, files, data and tokens."""

REFUSED = {
    "num_layers_per_virtual_pipeline_stage": "pipeline parallelism is not supported",
    "virtual_pipeline_model_parallel_size": "pipeline parallelism is not supported",
    "multi_latent_attention": "multi-head latent attention (MLA) is not supported",
    "squared_relu": "squared ReLU is not supported",
    "fp8_format": "FP8 is not supported",
    "fp8": "FP8 is not supported",
    "fp8_param_gather": "FP8 is not supported",
    "fp4_format": "FP4 is not supported",
    "moe_latent_size": "latent experts are not supported",
    "mtp_num_layers": "multi-token prediction layers are not supported",
    "window_size": "sliding-window attention is not supported",
    "window_attn_skip_freq": "sliding-window attention is not supported",
    "cpu_offloading": "offloading is not supported",
    "optimizer_cpu_offload": "offloading is not supported",
    "hybrid_override_pattern": "state-space layers are not supported",
    "encoder_num_layers": "encoder-decoder models are not supported: only decoder-only models are",
    "decoder_num_layers": "encoder-decoder models are not supported: only decoder-only models are",
    "apply_residual_connection_post_layernorm": "norms after the blocks are not supported",
    "use_precision_aware_optimizer": "moments in other formats are read from training.optimizer only",
    "heterogeneous_layers_config_path": "layers of different shapes are not supported",
}
"""Arguments that an exploration cannot honour, and why."""
