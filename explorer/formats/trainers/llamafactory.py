"""The keys of a LLaMA-Factory YAML. Names and defaults as of LLaMA-Factory 0.9.5."""

from __future__ import annotations

from typing import Any

from bexp.explorer.formats.trainers.library_arguments import IGNORED, REFUSED, SETTINGS
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
    Formats,
    Setting,
    TrainerFile,
    because,
    flag,
    if_on,
    must_be,
    names,
    negated,
    one_of,
    same,
    words,
)

_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}


def _is_given(value: Any) -> bool | None:
    return bool(value) or None


def _formats(said: Formats) -> tuple[str, str | None]:
    """It trains weights in float32 under autocast, unless it is told `pure_bf16`; frozen ones are in half precision."""
    if said.pure and said.has_adapters:
        raise ValueError("pure_bf16 keeps adapters in bfloat16, and they are measured in float32: say bf16: true")
    if said.has_adapters and not said.half:
        raise ValueError("adapters are measured under autocast: say bf16: true")
    if said.pure or said.half:
        return "bfloat16", "pure" if said.pure or said.has_adapters else "autocast"
    return "float32", "pure"


LLAMAFACTORY = TrainerFile(
    model="model_name_or_path",
    settings={
        **SETTINGS,
        "model_name_or_path": (Setting.MODEL, same),
        "cutoff_len": (Setting.SEQ_LENGTH, same),
        "pure_bf16": (Setting.PURE, flag),
        "stage": (Setting.PRETRAINING, one_of({"sft": False, "pt": True})),
        "finetuning_type": (Setting.ADAPTERS, one_of({"lora": True, "full": False})),
        "lora_rank": (Setting.R, same),
        "lora_alpha": (Setting.ALPHA, same),
        "lora_dropout": (Setting.DROPOUT, same),
        "lora_target": (Setting.MODULES, names),
        "additional_target": (Setting.SAVED, names),
        "resize_vocab": (Setting.RESIZED, if_on(True)),
        **dict.fromkeys(
            ("add_tokens", "add_special_tokens", "new_special_tokens_config"), (Setting.RESIZED, _is_given)
        ),
        "use_dora": (Setting.DORA, flag),
        "use_rslora": (Setting.RSLORA, flag),
        "quantization_bit": (Setting.BITS, one_of({"4": 4, "8": 8})),
        "quantization_method": must_be("bnb", "bitsandbytes", reason=OTHER_WEIGHTS),
        "quantization_type": must_be("nf4", reason=OTHER_WEIGHTS),
        "double_quantization": (Setting.NESTED, flag),
        "neat_packing": (Setting.PACKING, flag),
        "packing": (Setting.FULL_ROWS, flag),
        "flash_attn": (Setting.ATTENTION, one_of(_ATTENTION)),
        "disable_gradient_checkpointing": (Setting.RECOMPUTATION, negated),
    },
    defaults={
        Setting.MICRO_BATCH_SIZE: 8,
        Setting.SEQ_LENGTH: 2048,
        Setting.OPTIMIZER: "adamw_torch_fused",
        Setting.ADAPTERS: True,
        Setting.R: 8,
        Setting.MODULES: "all-linear",
    },
    alpha_by_rank=2,
    formats=_formats,
    refused={
        **REFUSED,
        **because(
            {
                PARALLEL: "use_mca use_hyper_parallel sequence_parallel_size",
                OFFLOADING: "use_kt kt_*",
                OTHER_TRAINING: "reward_model ref_model use_asft_loss predict_with_generate",
                OTHER_LOSS: "use_dft_loss use_eaft_loss",
                OTHER_WEIGHTS: "fp8 upcast_layernorm upcast_lmhead_output",
                OTHER_ADAPTERS: "adapter_name_or_path oft_*",
                PART_OF_WEIGHTS: "freeze_trainable_modules freeze_extra_modules use_llama_pro",
                OTHER_OPTIMIZER: "use_galore use_apollo use_badam use_adam_mini use_muon",
                KERNELS: "use_unsloth use_unsloth_gc enable_liger_kernel shift_attn use_v1_kernels",
                OTHER_MODEL: "rope_scaling mixture_of_depths",
            }
        ),
    },
    harmless=IGNORED
    | words(
        """
        adapter_folder cache_dir use_fast_tokenizer split_special_tokens init_special_tokens model_revision infer_*
        low_cpu_mem_usage moe_aux_loss_coef use_reentrant_gc train_from_scratch offload_folder use_kv_cache
        *_hub_token print_param_status trust_remote_code image_* video_* crop_to_* use_audio_in_video audio_* vllm_*
        sglang_* export_* template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history streaming
        buffer_size mix_strategy interleave_probs overwrite_cache preprocessing_* max_samples
        ignore_pad_token_for_loss val_size tool_format default_system enable_thinking preserve_thinking tokenized_path
        data_shared_file_system loraplus_* pissa_* create_new_adapter pref_* freeze_trainable_layers
        freeze_vision_tower freeze_multi_modal_projector freeze_language_model galore_* apollo_* badam_*
        compute_accuracy disable_shuffling early_stopping_steps plot_loss include_effective_tokens_per_second
        swanlab_* use_swanlab ray_* generation_* do_sample temperature top_p top_k max_new_tokens
        quantization_device_map fp8_* enable_torch_profiler profiler_* profile_modules ppo_* kto_* simpo_gamma
        """
    ),
)
