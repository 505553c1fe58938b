"""Fields of transformers' TrainingArguments and of DeepSpeed's JSON that change nothing here, or that are refused."""

from __future__ import annotations

ARGUMENTS_IGNORED = {
    **dict.fromkeys(
        (
            *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
            *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "seed", "data_seed"),
            *("label_smoothing_factor", "full_determinism"),
        ),
        "values of parameters and of the optimizer",
    ),
    **dict.fromkeys(
        (
            *("output_dir", "overwrite_output_dir", "run_name", "report_to", "project", "trackio_space_id", "do_train"),
            *("do_eval", "do_predict", "num_train_epochs", "max_steps", "disable_tqdm", "load_best_model_at_end"),
            *("metric_for_best_model", "greater_is_better", "resume_from_checkpoint", "ignore_data_skip"),
            *("restore_callback_states_from_checkpoint", "skip_memory_metrics", "prediction_loss_only"),
            *("per_device_eval_batch_size", "include_for_metrics", "include_inputs_for_metrics", "batch_eval_metrics"),
            *("use_legacy_prediction_loop", "label_names", "past_index", "remove_unused_columns", "group_by_length"),
            *("length_column_name", "train_sampling_strategy", "include_num_input_tokens_seen", "use_cpu", "no_cuda"),
            *("include_tokens_per_second", "average_tokens_across_devices", "local_rank", "debug", "log_level"),
            *("log_level_replica", "log_on_each_node", "use_mps_device", "jit_mode_eval", "enable_jit_checkpoint"),
        ),
        "data, the number of steps, evaluation, records and files",
    ),
    **dict.fromkeys(
        (
            *("tf32", "half_precision_backend", "fp16_opt_level", "fp16_backend", "bf16_full_eval", "fp16_full_eval"),
            *("fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "accelerator_config"),
            *("gradient_checkpointing_kwargs", "torch_compile_backend"),
            *("torch_compile_mode", "torch_empty_cache_steps"),
            *("parallelism_config", "optim_args", "optim_target_modules", "use_ipex", "auto_find_batch_size"),
        ),
        "details of choices that are read by themselves, or that an exploration makes",
    ),
}
"""Fields of TrainingArguments by name, and what they are."""

ARGUMENTS_IGNORED_PREFIXES = ("logging_", "save_", "eval_", "hub_", "push_to_hub", "dataloader_", "ddp_", "mp_")
"""Beginnings of names that stand for records, files, evaluation, data loading, and how gradients are gathered."""

ARGUMENTS_REFUSED = {
    "use_liger_kernel": "kernels of Liger are not measured: remove it",
    "liger_kernel_config": "kernels of Liger are not measured: remove it",
    "neftune_noise_alpha": "noise on embeddings is not supported",
    "galore_config": "optimizers other than AdamW and SGD are not supported",
}

ZERO_IGNORED = {
    **dict.fromkeys(
        (
            *("contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
            *("allgather_bucket_size", "sub_group_size", "round_robin_gradients", "stage3_prefetch_bucket_size"),
            *("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
            *("stage3_gather_16bit_weights_on_model_save", "load_from_fp32_weights", "elastic_checkpoint"),
            *("ignore_unused_parameters", "legacy_stage1", "stage3_module_granularity_threshold"),
        ),
        "the sizes of buffers, and files",
    )
}

DEEPSPEED_IGNORED = {
    **dict.fromkeys(
        (
            *("steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard", "wandb", "csv_monitor", "comet"),
            *("flops_profiler", "checkpoint", "data_types", "comms_logger", "memory_breakdown", "scheduler", "seed"),
            *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "communication_data_type"),
            *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "disable_allgather", "timers"),
            *("activation_checkpointing", "use_data_before_expert_parallel_", "sparse_gradients", "autotuning"),
        ),
        "values of the optimizer, records, files, and how gradients are gathered",
    )
}

DEEPSPEED_REFUSED = {
    "amp": "amp of Apex is not supported: use bf16",
    "pipeline": "pipeline parallelism is not supported",
    "tensor_parallel": "tensor parallelism is not supported",
    "sequence_parallel_size": "say context_parallel instead",
    "aio": "offloading is not supported",
    "compression_training": "compressed training is not supported",
    "sparse_attention": "sparse attention is not supported",
    "curriculum_learning": "sequences of changing length are not supported",
    "data_efficiency": "sequences of changing length are not supported",
    "progressive_layer_drop": "layers that are dropped are not supported",
    "elasticity": "batches of changing size are not supported",
}
