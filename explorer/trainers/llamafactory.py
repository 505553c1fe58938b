"""LLaMA-Factory's YAML, in and out. Names and defaults as of 0.9.5. By default it recomputes every layer."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.attention import TORCH_CHOICE
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import MUON
from bexp.explorer.model.training import LINEAR_MODULES
from bexp.explorer.trainers.deepspeed import DEEPSPEED_KEY
from bexp.explorer.trainers.document import (
    WHAT_ELSE,
    ExportDocument,
    TrainerSettings,
    expert_notes,
    plain_expert_notes,
    yaml_export,
)
from bexp.explorer.trainers.fsdp import FSDP, recomputes_itself, sharding_notes
from bexp.explorer.trainers.keys import (
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
    negated,
    one_of,
    without_exports,
    words,
)
from bexp.explorer.trainers.trainer import (
    LIBRARY_RUNS_IT,
    LORA,
    MUON_WITH_EXPERTS,
    OTHER_LIBRARIES,
    Trainer,
    expresses,
)
from bexp.explorer.trainers.transformers import (
    AUTOCAST,
    BATCH,
    CHECKPOINTING,
    HARMLESS,
    OPTIMIZER,
    ORDER,
    REFUSED,
)

ATTENTION = {
    "auto": None,
    "disabled": "eager",
    "sdpa": TORCH_CHOICE,
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}
"""Its names of attention."""
_NAMES_OF_ATTENTION = {library: name for name, library in ATTENTION.items() if library is not None}


def _formats(said: Formats) -> tuple[str, str | None]:
    """Return the formats: trained weights in float32 under autocast, unless `pure_bf16`; frozen ones in 16 bits."""
    if said.pure and said.has_adapters:
        raise ValueError("pure_bf16 keeps adapters in bfloat16, and they are measured in float32: say bf16: true")
    if said.has_adapters and not said.half:
        raise ValueError("adapters are measured under autocast: say bf16: true")
    if said.pure or said.half:
        return "bfloat16", "pure" if said.pure or said.has_adapters else "autocast"
    return "float32", "pure"


def _is_pure(settings: TrainerSettings) -> bool | None:
    """Return true to train in bfloat16; by default LLaMA-Factory trains weights in float32."""
    return (settings.dtype is DType.BFLOAT16 and not settings.has_autocast) or None


def _finetuning_type(settings: TrainerSettings) -> str | None:
    return "lora" if settings.lora is not None else None if settings.is_own_code else "full"


def _modules(value: Any) -> Any:
    if (listed := names(value)) == "all-linear":
        raise ValueError("is no name of a module: say all")
    return LINEAR_MODULES if listed == ["all"] else listed


def _target(settings: TrainerSettings) -> str | None:
    if settings.lora is None:
        return None
    modules = settings.lora.target_modules
    return "all" if isinstance(modules, str) else ",".join(modules or ())


def _loaded_bits(settings: TrainerSettings) -> int | None:
    """Return the bits of weights that are quantised when they are loaded; a quantised checkpoint states its own."""
    known = settings.quantization
    return None if known is None or known.is_own else known.bits


def _of_arguments(value: Any) -> Any:
    if value == MUON:
        raise ValueError("TrainingArguments have no such name: say use_muon: true")
    return value


KEYS = {
    **BATCH,
    "disable_gradient_checkpointing": Key(
        Setting.RECOMPUTATION, negated, lambda settings: not recomputes_itself(settings)
    ),
    "use_reentrant_gc": Key(write=lambda settings: False),
    **OPTIMIZER,
    "optim": key(Setting.OPTIMIZER, _of_arguments),
    "use_muon": Key(Setting.OPTIMIZER, if_on(MUON), lambda settings: settings.optimizer == MUON or None),
    **AUTOCAST,
    **FSDP,
    "deepspeed": DEEPSPEED_KEY,
    **without_exports(CHECKPOINTING),
    "torch_compile": Key(Setting.COMPILE, flag),
    "model_name_or_path": Key(Setting.MODEL),
    "stage": Key(Setting.PRETRAINING, one_of({"sft": False, "pt": True})),
    "finetuning_type": Key(Setting.ADAPTERS, one_of({"lora": True, "full": False}), _finetuning_type),
    "lora_rank": key(Setting.R),
    "lora_alpha": key(Setting.ALPHA, write=int),  # others are refused
    "lora_target": Key(Setting.MODULES, _modules, _target),
    "lora_dropout": key(Setting.DROPOUT),
    "additional_target": key(Setting.SAVED, names, ",".join),
    "resize_vocab": Key(Setting.RESIZED, if_on(True)),
    **dict.fromkeys(
        ("add_tokens", "add_special_tokens", "new_special_tokens_config"),
        Key(Setting.RESIZED, lambda value: bool(value) or None),
    ),
    "use_dora": key(Setting.DORA, flag),
    "use_rslora": key(Setting.RSLORA, flag),
    "quantization_bit": Key(Setting.BITS, one_of({"4": 4, "8": 8}), _loaded_bits),
    "quantization_method": must_be(
        *("bnb", "bitsandbytes"), reason=Why.OTHER_WEIGHTS, write=lambda settings: _loaded_bits(settings) and "bnb"
    ),
    "quantization_type": must_be(
        "nf4", reason=Why.OTHER_WEIGHTS, write=lambda settings: "nf4" if _loaded_bits(settings) == 4 else None
    ),
    "double_quantization": Key(Setting.NESTED, flag, lambda settings: _loaded_bits(settings) == 4 or None),
    "pure_bf16": Key(Setting.PURE, flag, _is_pure),
    "cutoff_len": key(Setting.SEQ_LENGTH),
    "packing": Key(Setting.FULL_ROWS, flag, lambda settings: settings.batching and settings.packs),
    "neat_packing": key(Setting.PACKING, flag),
    **ORDER,
    "flash_attn": key(Setting.ATTENTION, one_of(ATTENTION), _NAMES_OF_ATTENTION.__getitem__),
}
FILE = TrainerFile(
    model="model_name_or_path",
    keys=KEYS,
    program=r"(?:.*/)?(?:llamafactory-cli|lmf)",
    defaults={
        Setting.MICRO_BATCH_SIZE: 8,
        Setting.SEQ_LENGTH: 2048,
        Setting.OPTIMIZER: "adamw_torch_fused",
        Setting.RECOMPUTATION: True,
        Setting.ADAPTERS: True,
        Setting.R: 8,
        Setting.MODULES: LINEAR_MODULES,
    },
    alpha_by_rank=2,
    formats=_formats,
    refused={
        **REFUSED,
        **because(
            {
                Why.PARALLEL: "use_mca use_hyper_parallel sequence_parallel_size",
                Why.OFFLOADING: "use_kt kt_*",
                Why.OTHER_TRAINING: "reward_model ref_model use_asft_loss predict_with_generate",
                Why.OTHER_LOSS: "use_dft_loss use_eaft_loss",
                Why.OTHER_WEIGHTS: "fp8 upcast_layernorm upcast_lmhead_output",
                Why.OTHER_ADAPTERS: "adapter_name_or_path oft_*",
                Why.PART_OF_WEIGHTS: "freeze_trainable_modules freeze_extra_modules use_llama_pro",
                Why.OTHER_OPTIMIZER: "use_galore use_apollo use_badam use_adam_mini",
                Why.KERNELS: "use_unsloth use_unsloth_gc enable_liger_kernel shift_attn use_v1_kernels",
                Why.OTHER_MODEL: "rope_scaling mixture_of_depths",
            }
        ),
    },
    harmless=HARMLESS
    | words(
        """
        use_cache trackio_* liger_kernel_config
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


def render(settings: TrainerSettings) -> ExportDocument:
    """Return the part of a configuration that an exploration decides, as YAML."""
    notes = [f"add model_name_or_path, dataset {WHAT_ELSE}", *sharding_notes(settings)]
    if settings.quantization is not None:
        notes.append(
            f"memory: LLaMA-Factory keeps the other weights in {settings.dtype}; they were measured in float32, as "
            "peft prepares them, so it needs less"
        )
    notes += [*plain_expert_notes(settings), *expert_notes(settings)]
    return yaml_export(settings, fields_of(KEYS, settings), notes)


LLAMAFACTORY = Trainer(
    name="llamafactory",
    title="LLaMA-Factory",
    formats={"llamafactory": render},
    file=FILE,
    expresses=expresses(
        attention=_NAMES_OF_ATTENTION, optimizer={OTHER_LIBRARIES, MUON, MUON_WITH_EXPERTS}, adapters={LORA}
    ),
    has_deepspeed=True,
    widens_shards=True,
    largest_packed={"flash_attention_2": 1, "flash_attention_3": 0},  # one row alone, and another mask
    lists_linear=True,
    targets=LIBRARY_RUNS_IT,
    awaits_losses=True,
    halves_experts=True,
    halves_shell=True,
)
