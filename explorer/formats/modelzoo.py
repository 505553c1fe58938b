"""The `model` section of a Cerebras Model Zoo YAML (GPT-2, GPT-3, Llama, Mistral, Mixtral, Falcon) as a ModelSpec.

Fields and defaults are those of Model Zoo's GPT-2 model class, which the other models share, or of its GPT-J class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bexp.explorer.formats.model_types import refuse_vision
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.translation import Location, Section, Translation
from bexp.explorer.trainers.keys import because

MARKS = frozenset({"num_heads", "filter_size"})
"""A model section with either of these keys is one of Model Zoo's."""

GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
NONLINEARITIES = {name: (name, False) for name in ("gelu", "silu", "relu")} | {
    name: (inner, True) for name, inner in GATED.items()
}

POSITIONS = {"learned": "learned", "rotary": "rope"}
NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}
DTYPES = {"bfloat16": "bfloat16", "cbfloat16": "bfloat16", "float16": "float16"}


def translate_model(
    config: Mapping[str, Any], location: Location, translation: Translation, seq_length: Any = None
) -> None:
    """Set `model` of `translation` from the Model Zoo model section at `location`.

    A sequence is as long as `max_position_embeddings`, unless our own `seq_length` is stated there or passed.
    """
    model = translation.section(config, location)
    if refuse_vision(model, "name"):
        return
    if refuse_network(model):
        return
    network = model.get("name")
    is_parallel = _is_parallel(model)
    if not is_parallel and network is not None and str(network).lower() not in NETWORKS:
        supported = ", ".join((*NETWORKS, *PARALLEL_NETWORKS))
        model.refuse("name", f"{shortened(repr(network))} is not supported; supported: {supported}")
    model.refuse_where_set(REFUSED)
    untied = model.boolean("use_untied_layer_norm")
    if is_parallel and not untied:
        model.refuse("use_untied_layer_norm", "must be true: a norm that attention and FFN share is not supported")
    elif untied and not is_parallel:
        model.refuse("use_untied_layer_norm", f"belongs to {', '.join(PARALLEL_NETWORKS)} alone")
    translation.put(("model", "parallel_residual"), is_parallel)
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
    if network is not None:
        translation.put(("model", "name"), str(network), model.at("name"))
    translation.put(("model", "norm"), model.choice("norm_type", NORMS, "layernorm"), model.at("norm_type"))
    activation, gated = model.choice("nonlinearity", NONLINEARITIES, "gelu")
    translation.put(("model", "activation"), activation, model.at("nonlinearity"))
    translation.put(("model", "gated_mlp"), gated)
    _take_dtype(model)
    _take_positions(model, seq_length)
    _take_attention(model)
    _take_ffn(model)
    model.ignore(IGNORED)
    model.refuse_unread("is not a known field; remove it if it changes no shape")


def refuse_network(model: Section) -> bool:
    """Refuse a network of Model Zoo that is no decoder-only language model, at its name; return whether it is one."""
    name = model.values.get("name")
    parts = name.lower().split("/") if isinstance(name, str) else [""]
    if parts[0] not in UNSUPPORTED_NETWORKS or "model_type" in model:
        return False
    model.refuse("name", f"{shortened(repr(name))} is not supported: it {UNSUPPORTED_NETWORKS[parts[0]]}")
    return True


def _is_parallel(model: Section) -> bool:
    return str(model.values.get("name")).lower() in PARALLEL_NETWORKS


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
        default = "rotary" if _is_parallel(model) else "learned"
        position = model.choice("position_embedding_type", POSITIONS, default)
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
    extra.refuse_unread("is not a known field; remove it if it changes no shape")
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
        model.take("use_ffn_bias", ("model", "mlp_bias"), not _is_parallel(model))
        return
    if model.boolean("use_ffn_bias", not _is_parallel(model)):
        model.refuse("use_ffn_bias", "biases in experts are not supported: set it to false")
    moe.take("num_experts", ("model", "moe", "num_experts"))
    moe.take("top_k", ("model", "moe", "top_k"), 1)
    moe.take("expert_weighting_normalization", ("model", "moe", "norm_topk_prob"), True)
    model.take("filter_size", ("model", "moe", "expert_ffn_hidden_size"), 3072)
    shared = (moe.integer("num_shared_experts", largest=1024) or 0) * (model.integer("filter_size", 3072) or 0)
    translation.put(("model", "moe", "shared_expert_ffn_hidden_size"), shared, moe.at("num_shared_experts"))
    moe.choice("routing_algorithm", {"learned": None}, "learned")
    moe.ignore(MOE_IGNORED)
    moe.refuse_unread("is not a known field; remove it if it changes no shape")


NETWORKS = ("gpt2", "gpt3", "llama", "mistral", "mixtral", "starcoder", "santacoder")
PARALLEL_NETWORKS = ("gptj", "falcon")
"""Networks of Model Zoo's GPT-J class: attention and FFN read the same input, each through a norm of its own or one."""


UNSUPPORTED_NETWORKS = because(
    {
        "is a vision network; exploration is limited to language models": (
            "vision_transformer vit dit dino dinov2imagemodel generic_image_encoders fc_mnist mnist"
        ),
        "reads images; exploration is limited to language models": "llava multimodal_simple multimodalsimple mllama",
        "is an encoder; only decoder-only language models are supported": "bert roberta esm2 dpr",
        "is an encoder and a decoder; only decoder-only language models are supported": "t5 transformer",
        "is preference training with two models; only language-model training is supported": "dpo",
        "has ALiBi positions, which are not supported": "bloom btlm jais",
        "has soft-capping and sliding windows, which are not supported": "gemma2",
    }
)
"""Networks of Model Zoo that cannot be explored, and why."""

IGNORED = because(
    {
        "dropout, which no exploration runs": (
            "dropout_rate attention_dropout_rate embedding_dropout_rate residual_dropout_rate embd_pdrop"
        ),
        "the first values of parameters": (
            "initializer_range initializer embedding_initializer output_layer_initializer ffn_initializer "
            "ffn_output_layer_initializer attention_initializer"
        ),
        "scalars that a kernel multiplies by anyway": (
            "lr_adjustment_groups mup_base_hidden_size mup_base_filter_size embeddings_scale embeddings_alpha "
            "scale_qk_dot_by_d scale_qk_dot_by_layer_idx attention_logits_alpha scale_output_logits_by_d "
            "output_logits_alpha output_logits_scale layer_norm_epsilon"
        ),
        "the angles of rotary embeddings, and positions of kinds that are refused": (
            "rope_theta fold_rope_consts pos_scaling_factor pos_scaling_type pos_scaling_extra_args "
            "position_embedding_offset num_relative_attention_buckets"
        ),
        "how Cerebras computes attention; here the kernel is explored": (
            "attention_type attention_softmax_fp32 attention_kernel boundary_casting precision_opt_level"
        ),
        "scalars of the loss": "loss_scaling loss_weight",
        "what is recorded of an evaluation": "compute_eval_metrics",
        "generation": "start_token loop_dim stop_sequences max_tokens temperature top_k top_p",
        "set by Model Zoo itself; mixed_precision and fp16_type decide": "dtype",
    }
)
"""Fields of the model that change neither time nor memory of a training step, and why."""

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
}

MOE_IGNORED = because(
    {
        "scalars of the router": "load_balancing_loss_coef null_expert_bias",
        "values of the router": "gate_initializer sinkhorn_n_iters",
        "work for each token and expert, which is small compared with the experts": (
            "router_fp32 router_selection_nonlinearity expert_weighting_nonlinearity probability_before_ffn"
        ),
        "how Cerebras computes the experts": "moe_implementation moe_optimized_impl",
    }
)
"""Fields of `moe` that change neither time nor memory noticeably, and why."""
