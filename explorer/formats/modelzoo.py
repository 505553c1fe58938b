"""The `model` section of a Cerebras Model Zoo YAML (GPT-2, GPT-3, Llama, Mistral, Mixtral) as a ModelSpec.

Fields and defaults are those of Model Zoo's GPT-2 model class, which the other models share. Dropout, the router's
balancing loss, and fields that only scale or initialise values are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from explorer.formats.document import Location
from explorer.formats.translation import Section, Translation
from explorer.formats.vision import refuse_vision

MARKS = frozenset({"num_heads", "filter_size"})
"""A model section with either of these keys is one of Model Zoo's."""

NETWORKS = ("gpt2", "gpt3", "llama", "mistral", "mixtral", "starcoder", "santacoder")

GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
NONLINEARITIES = {name: (name, False) for name in ("gelu", "silu", "relu")} | {
    name: (inner, True) for name, inner in GATED.items()
}

POSITIONS = {"learned": "learned", "rotary": "rope"}
NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}
DTYPES = {"bfloat16": "bfloat16", "cbfloat16": "bfloat16", "float16": "float16"}

IGNORED = frozenset(
    {
        *("dropout_rate", "attention_dropout_rate", "embedding_dropout_rate", "embd_pdrop", "layer_norm_epsilon"),
        *("initializer_range", "initializer", "embedding_initializer", "output_layer_initializer"),
        *("ffn_initializer", "ffn_output_layer_initializer", "lr_adjustment_groups", "mup_base_hidden_size"),
        *("mup_base_filter_size", "embeddings_scale", "scale_qk_dot_by_d", "attention_logits_alpha"),
        *("scale_output_logits_by_d", "output_logits_alpha", "output_logits_scale", "scale_qk_dot_by_layer_idx"),
        *("attention_type", "attention_softmax_fp32", "attention_kernel", "rope_theta", "fold_rope_consts"),
        *("pos_scaling_factor", "pos_scaling_type", "pos_scaling_extra_args", "position_embedding_offset"),
        *("num_relative_attention_buckets", "loss_scaling", "loss_weight", "compute_eval_metrics"),
        *("boundary_casting", "start_token", "loop_dim", "stop_sequences", "max_tokens", "temperature", "top_k"),
        *("top_p", "dtype", "precision_opt_level"),
    }
)

REFUSED = {
    "attention_sliding_window_length": "sliding-window attention is not supported",
    "sliding_window_every_other_decoder_layer": "sliding-window attention is not supported",
    "attention_sink_tokens": "attention sinks are not supported",
    "attention_vertical_column_spacing": "sparse attention is not supported",
    "attention_vertical_column_width": "sparse attention is not supported",
    "attention_chunk_size": "locally banded attention is not supported",
    "fixed_sparse_attention": "sparse attention is not supported",
    "attention_logit_softcapping": "soft-capped attention scores are not supported",
    "final_logit_softcapping": "soft-capped logits are not supported",
    "num_memory_tokens_per_chunk": "memory tokens are not supported",
    "attn_memory_chunk_size": "memory tokens are not supported",
    "embedding_layer_norm": "a norm after the embedding is not supported",
    "norm_first_sandwich": "norms after the blocks are not supported",
    "alibi_trainable_slopes": "ALiBi positions are not supported",
    "constant_pos_embedding": "a constant position embedding is not supported",
    "rel_distance_extra_args": "capped or grouped relative distances are not supported",
    "extra_ffn_params": "variants of the FFN are not supported",
    "use_untied_layer_norm": "GPT-J's parallel layers are not supported",
}

MOE_IGNORED = frozenset(
    {
        *("load_balancing_loss_coef", "router_fp32", "null_expert_bias", "gate_initializer", "sinkhorn_n_iters"),
        *("router_selection_nonlinearity", "expert_weighting_nonlinearity", "probability_before_ffn"),
        *("moe_implementation", "moe_optimized_impl"),
    }
)


def translate_model(
    config: Mapping[str, Any], location: Location, translation: Translation, seq_length: Any = None
) -> None:
    """Set `model` of `translation` from a Model Zoo model section found at `location`.

    A sequence is as long as `max_position_embeddings`, unless our own `seq_length` stands beside it or is passed.
    """
    model = translation.section(config, location)
    if refuse_vision(model, "name"):
        return
    network = model.get("name")
    if network is not None and str(network).lower() not in NETWORKS:
        model.refuse("name", f"{network!r:.60} is not supported; supported: {', '.join(NETWORKS)}")
    model.refuse_where_set(REFUSED)
    for key, name, default in (
        ("num_hidden_layers", "num_layers", 12),
        ("hidden_size", "hidden_size", 768),
        ("num_heads", "num_attention_heads", 12),
        ("vocab_size", "vocab_size", 50257),
        ("max_position_embeddings", "max_position_embeddings", 1024),
        ("share_embedding_weights", "tie_embeddings", True),
        ("use_projection_bias_in_attention", "qkv_bias", True),
        ("use_ffn_bias_in_attention", "attention_output_bias", True),
        ("use_bias_in_output", "lm_head_bias", False),
    ):
        model.take(key, ("model", name), default)
    translation.put(("model", "name"), str(network or "model"), model.at("name"))
    translation.put(("model", "norm"), model.choice("norm_type", NORMS, "layernorm"), model.at("norm_type"))
    activation, gated = model.choice("nonlinearity", NONLINEARITIES, "gelu")
    translation.put(("model", "activation"), activation, model.at("nonlinearity"))
    translation.put(("model", "gated_mlp"), gated)
    _take_dtype(model)
    _take_positions(model, seq_length)
    _take_attention(model)
    _take_ffn(model)
    model.ignore(IGNORED)
    model.refuse_unread("is not a field that is known here; remove it if it changes no shape")


def _take_dtype(model: Section) -> None:
    dtype = model.choice("fp16_type", DTYPES, "bfloat16")
    mixed = model.get("mixed_precision")
    target = ("model", "dtype")
    if model.translation.get(*target) is not None:
        return
    if mixed is not None and not model.boolean("mixed_precision"):
        model.translation.put(target, "float32", model.at("mixed_precision"))
    else:
        model.translation.put(target, dtype, model.at("fp16_type"))


def _take_positions(model: Section, seq_length: Any) -> None:
    translation = model.translation
    if "position_embedding_type" in model and model.get("position_embedding_type") in (None, "None", "none"):
        position = "none"
    else:
        position = model.choice("position_embedding_type", POSITIONS, "learned")
    translation.put(("model", "position"), position, model.at("position_embedding_type"))
    own = "seq_length" if model.get("seq_length") is not None else "max_position_embeddings"
    if seq_length is None:
        model.take(own, ("model", "seq_length"), 1024)
    else:
        translation.put(("model", "seq_length"), seq_length)
    rotary_dim = model.integer("rotary_dim")
    width = model.integer("attention_inner_dim") or model.integer("hidden_size", 768)
    heads = model.integer("num_heads", 12)
    if position == "rope" and rotary_dim and width and heads:
        translation.put(("model", "rotary_fraction"), rotary_dim * heads / width, model.at("rotary_dim"))
    if model.get("rel_distance_mode", "default") != "default":
        model.refuse("rel_distance_mode", "capped or grouped relative distances are not supported")


def _take_attention(model: Section) -> None:
    extra = model.section("extra_attention_params")
    modules = {"aiayn_attention": False, "multiquery_attention": True}
    if model.choice("attention_module", modules, "aiayn_attention"):
        extra.take("num_kv_groups", ("model", "num_query_groups"), 1)
    elif extra.get("num_kv_groups") is not None:
        extra.refuse("num_kv_groups", "needs attention_module: multiquery_attention")
    extra.refuse_unread("is not a field that is known here; remove it if it changes no shape")
    inner, heads = model.integer("attention_inner_dim"), model.integer("num_heads", 12)
    if inner and heads:
        if inner % heads:
            model.refuse("attention_inner_dim", f"must be a multiple of num_heads ({heads})")
        model.translation.put(("model", "head_dim"), inner // heads, model.at("attention_inner_dim"))


def _take_ffn(model: Section) -> None:
    """Set the FFN: one `filter_size` is the width of the dense FFN, of an expert and of a shared expert."""
    translation = model.translation
    key = "moe" if model.get("moe") is not None else "moe_params"
    moe = model.section(key)
    num_experts = moe.integer("num_experts", 1)
    if num_experts is not None and num_experts <= 1 and not moe.get("num_shared_experts"):
        moe.ignore(moe.values)
        model.take("filter_size", ("model", "ffn_hidden_size"), 3072)
        model.take("use_ffn_bias", ("model", "mlp_bias"), True)
        return
    if model.boolean("use_ffn_bias", True):
        model.refuse("use_ffn_bias", "biases in experts are not supported: set it to false")
    moe.take("num_experts", ("model", "moe", "num_experts"))
    moe.take("top_k", ("model", "moe", "top_k"), 1)
    moe.take("expert_weighting_normalization", ("model", "moe", "norm_topk_prob"), True)
    model.take("filter_size", ("model", "moe", "expert_ffn_hidden_size"), 3072)
    shared = (moe.integer("num_shared_experts", largest=1024) or 0) * (model.integer("filter_size", 3072) or 0)
    translation.put(("model", "moe", "shared_expert_ffn_hidden_size"), shared, moe.at("num_shared_experts"))
    moe.choice("routing_algorithm", {"learned": None}, "learned")
    moe.ignore(MOE_IGNORED)
    moe.refuse_unread("is not a field that is known here; remove it if it changes no shape")
