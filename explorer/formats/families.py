"""The Hugging Face model types that can be imported, and the fields of config.json that can be honoured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bexp.explorer.trainers.keys import because

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}

DTYPES = {prefix + name: name for prefix in ("", "torch.") for name in ("bfloat16", "float16", "float32")}

IGNORED = because(
    {
        "dropout, initialisation, epsilons, scalars": (
            "attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout classifier_dropout initializer_range "
            "rms_norm_eps layer_norm_eps layer_norm_epsilon scale_attn_weights scale_attn_by_inverse_layer_idx"
        ),
        "the angles of rotary embeddings, however they are scaled": (
            "rope_theta rope_scaling rotary_emb_base original_max_position_embeddings"
        ),
        "the router's losses": ("router_aux_loss_coef router_jitter_noise output_router_logits router_z_loss_coef"),
        "generation and tokens": (
            "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id use_cache n_ctx max_length "
            "min_length do_sample temperature top_k top_p typical_p repetition_penalty length_penalty num_beams "
            "num_return_sequences no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id "
            "suppress_tokens early_stopping num_beam_groups diversity_penalty encoder_no_repeat_ngram_size "
            "remove_invalid_values begin_suppress_tokens exponential_decay_length_penalty"
        ),
        "book-keeping": (
            "architectures transformers_version _attn_implementation _attn_implementation_autoset tokenizer_class "
            "prefix gradient_checkpointing pretraining_tp output_attentions output_hidden_states output_past "
            "return_dict return_dict_in_generate output_scores torchscript use_bfloat16 tf_legacy_loss "
            "chunk_size_feed_forward id2label label2id num_labels problem_type finetuning_task task_specific_params "
            "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
            "unsloth_version unsloth_fixed tie_encoder_decoder is_decoder cross_attention_hidden_size"
        ),
        "code that comes with the model, which is never run": "auto_map",
    }
)

NEUTRAL: Mapping[str, Any] = {"residual_multiplier": 1, "embedding_multiplier": 1, "logits_scaling": 1}
"""Values of refused fields that change nothing."""

REFUSED = {
    "kv_lora_rank": "multi-head latent attention (MLA) is not supported",
    "q_lora_rank": "multi-head latent attention (MLA) is not supported",
    "qk_rope_head_dim": "multi-head latent attention (MLA) is not supported",
    "v_head_dim": "value heads of another width are not supported",
    "attn_logit_softcapping": "soft-capped attention scores are not supported",
    "final_logit_softcapping": "soft-capped logits are not supported",
    "logit_cap": "soft-capped logits are not supported",
    "attention_chunk_size": "chunked attention is not supported",
    "attention_multiplier": "an attention multiplier is not supported",
    "residual_multiplier": "a residual multiplier is not supported",
    "embedding_multiplier": "an embedding multiplier is not supported",
    "logits_scaling": "scaled logits are not supported",
    "num_nextn_predict_layers": "multi-token prediction layers are not supported",
    "quantization_config": "quantised weights are not supported: exploration is for training in plain dtypes",
    "clip_qkv": "clipped queries, keys and values are not supported",
    "reorder_and_upcast_attn": "attention in float32 in a model of another dtype is not supported",
    "add_cross_attention": "cross attention is not supported: only decoder-only models are",
    "is_encoder_decoder": "encoder-decoder models are not supported: only decoder-only models are",
    "pruned_heads": "pruned heads are not supported",
    "text_config": "a configuration inside a configuration is not supported: hand in the text model's own",
    "audio_config": "exploration is limited to language models",
}

UNSUPPORTED_TYPES = because(
    {
        "multi-head latent attention": "deepseek_v2 deepseek_v3 kimi_k2 minicpm3",
        "scaled embeddings and a norm of its own": "gemma",
        "soft-capping and sliding windows": "gemma2",
        "sliding windows and norms after the blocks": "gemma3_text olmo3",
        "sliding windows and attention sinks": "gpt_oss",
        "a norm without parameters": "olmo",
        "norms after the blocks": "olmo2",
        "attention, residual and logit multipliers": "granite",
        "scaled logits and a single norm a layer": "cohere",
        "a single norm a layer": "falcon gptj phi",
        "ALiBi positions": "bloom mpt",
        "no attention": "mamba",
        "state-space layers": "jamba",
    }
)


@dataclass(frozen=True)
class Family:
    """A model type: the values that transformers fixes in its code, and the defaults of its config class."""

    defaults: Mapping[str, Any]
    """The defaults of the config class, by the field of config.json."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The fields of config.json, by the field of ModelSpec."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """The only values of fields of ModelSpec."""
    moe_keys: Mapping[str, str] = field(default_factory=dict)
    moe_fixed: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The names in use of fields of config.json, by their other names."""
    activation_key: str = "hidden_act"
    positions_key: str = "max_position_embeddings"
    window: str | None = None  # "always": wherever sliding_window is set; "switched": where use_sliding_window is
    sparse_step: bool = False


_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}
_DENSE_KEYS = {**_KEYS, "ffn_hidden_size": "intermediate_size"}
_BIAS_KEYS = {"qkv_bias": "attention_bias", "attention_output_bias": "attention_bias"}
_MOE_KEYS = {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "norm_topk_prob": "norm_topk_prob"}


_SHAPES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)


def _defaults(*shapes: int | None, **more: Any) -> dict[str, Any]:
    """Return the defaults of a config class, given those of `_SHAPES`."""
    named = dict(zip(_SHAPES, shapes, strict=True))
    return {**named, "tie_word_embeddings": False, "hidden_act": "silu", **more}


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        defaults={
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "vocab_size": 50257,
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        keys={
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
            "tie_embeddings": "tie_word_embeddings",
            "max_position_embeddings": "n_positions",
        },
        fixed={
            "norm": "layernorm",
            "position": "learned",
            "gated_mlp": False,
            "qkv_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        activation_key="activation_function",
        positions_key="n_positions",
    ),
    "gpt_neox": Family(
        defaults=_defaults(
            44, 6144, 24576, 64, None, 50432, 2048, hidden_act="gelu", use_parallel_residual=True, attention_bias=True
        ),
        keys={
            **{name: key for name, key in _DENSE_KEYS.items() if name not in ("num_query_groups", "head_dim")},
            **_BIAS_KEYS,
            "parallel_residual": "use_parallel_residual",
        },
        fixed={"norm": "layernorm", "gated_mlp": False, "mlp_bias": True},
    ),
    "llama": Family(
        defaults=_defaults(32, 4096, 11008, 32, None, 32000, 2048, attention_bias=False, mlp_bias=False),
        keys={**_DENSE_KEYS, **_BIAS_KEYS, "mlp_bias": "mlp_bias"},
    ),
    "mistral": Family(
        defaults=_defaults(32, 4096, 14336, 32, 8, 32000, 131072, sliding_window=4096),
        keys=_DENSE_KEYS,
        window="always",
    ),
    "qwen2": Family(
        defaults=_defaults(32, 4096, 22016, 32, 32, 151936, 32768, sliding_window=4096, max_window_layers=28),
        keys=_DENSE_KEYS,
        fixed={"qkv_bias": True},
        window="switched",
    ),
    "qwen3": Family(
        defaults=_defaults(
            *(32, 4096, 22016, 32, 32, 151936, 32768),
            head_dim=128,
            attention_bias=False,
            sliding_window=4096,
            max_window_layers=28,
        ),
        keys={**_DENSE_KEYS, **_BIAS_KEYS},
        fixed={"qk_norm": "head"},
        window="switched",
    ),
    "mixtral": Family(
        defaults=_defaults(32, 4096, 14336, 32, 8, 32000, 131072, num_local_experts=8, num_experts_per_tok=2),
        keys=_KEYS,
        moe_keys={
            "num_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_ffn_hidden_size": "intermediate_size",
        },
        moe_fixed={"norm_topk_prob": True},
        aliases={"num_experts": "num_local_experts"},
        window="always",
    ),
    "olmoe": Family(
        defaults=_defaults(
            *(16, 2048, 2048, 16, None, 50304, 4096),
            attention_bias=False,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=False,
        ),
        keys={**{name: key for name, key in _KEYS.items() if name != "head_dim"}, **_BIAS_KEYS},
        fixed={"qk_norm": "full"},
        moe_keys={**_MOE_KEYS, "expert_ffn_hidden_size": "intermediate_size"},
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen2_moe": Family(
        defaults=_defaults(
            *(24, 2048, 5632, 16, 16, 151936, 32768),
            qkv_bias=True,
            sliding_window=4096,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            norm_topk_prob=False,
        ),
        keys={**_DENSE_KEYS, "qkv_bias": "qkv_bias"},
        moe_keys={
            **_MOE_KEYS,
            "expert_ffn_hidden_size": "moe_intermediate_size",
            "shared_expert_ffn_hidden_size": "shared_expert_intermediate_size",
        },
        moe_fixed={"shared_expert_gate": True},
        window="switched",
        sparse_step=True,
    ),
    "qwen3_moe": Family(
        defaults=_defaults(
            *(24, 2048, 6144, 32, 4, 151936, 32768),
            attention_bias=False,
            sliding_window=4096,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=False,
        ),
        keys={**_DENSE_KEYS, **_BIAS_KEYS},
        fixed={"qk_norm": "head"},
        moe_keys={**_MOE_KEYS, "expert_ffn_hidden_size": "moe_intermediate_size"},
        aliases={"num_local_experts": "num_experts"},
        window="switched",
        sparse_step=True,
    ),
}
