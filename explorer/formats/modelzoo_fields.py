"""The networks and the fields of Cerebras Model Zoo's `model` section: which are supported, ignored or refused."""

from __future__ import annotations

NETWORKS = ("gpt2", "gpt3", "llama", "mistral", "mixtral", "starcoder", "santacoder")
PARALLEL_NETWORKS = ("gptj", "falcon")
"""Networks of Model Zoo's GPT-J class: attention and FFN read the same input, each through a norm of its own or one."""

_VISION = "is a vision network; exploration is limited to language models"
_ENCODER = "is an encoder; only decoder-only language models are supported"
UNSUPPORTED_NETWORKS = {
    **dict.fromkeys(
        ("vision_transformer", "vit", "dit", "dino", "dinov2imagemodel", "generic_image_encoders", "fc_mnist", "mnist"),
        _VISION,
    ),
    **dict.fromkeys(
        ("llava", "multimodal_simple", "multimodalsimple", "mllama"),
        "reads images; exploration is limited to language models",
    ),
    **dict.fromkeys(("bert", "roberta", "esm2", "dpr"), _ENCODER),
    **dict.fromkeys(
        ("t5", "transformer"), "is an encoder and a decoder; only decoder-only language models are supported"
    ),
    "dpo": "is preference training with two models; only language-model training is supported",
    **dict.fromkeys(("bloom", "btlm", "jais"), "has ALiBi positions, which are not supported"),
    "gemma2": "has soft-capping and sliding windows, which are not supported",
}
"""Networks of Model Zoo that cannot be explored, and why."""

IGNORED = {
    **dict.fromkeys(
        (*("dropout_rate", "attention_dropout_rate", "embedding_dropout_rate", "residual_dropout_rate", "embd_pdrop"),),
        "dropout, which no exploration runs",
    ),
    **dict.fromkeys(
        (
            *("initializer_range", "initializer", "embedding_initializer", "output_layer_initializer"),
            *("ffn_initializer", "ffn_output_layer_initializer", "attention_initializer"),
        ),
        "the first values of parameters",
    ),
    **dict.fromkeys(
        (
            *("lr_adjustment_groups", "mup_base_hidden_size", "mup_base_filter_size", "embeddings_scale"),
            *("embeddings_alpha", "scale_qk_dot_by_d", "scale_qk_dot_by_layer_idx", "attention_logits_alpha"),
            *("scale_output_logits_by_d", "output_logits_alpha", "output_logits_scale", "layer_norm_epsilon"),
        ),
        "scalars that a kernel multiplies by anyway",
    ),
    **dict.fromkeys(
        (
            *("rope_theta", "fold_rope_consts", "pos_scaling_factor", "pos_scaling_type", "pos_scaling_extra_args"),
            *("position_embedding_offset", "num_relative_attention_buckets"),
        ),
        "the angles of rotary embeddings, and positions of kinds that are refused",
    ),
    **dict.fromkeys(
        ("attention_type", "attention_softmax_fp32", "attention_kernel", "boundary_casting", "precision_opt_level"),
        "how Cerebras computes attention; here the kernel is explored",
    ),
    **dict.fromkeys(("loss_scaling", "loss_weight"), "scalars of the loss"),
    **dict.fromkeys(("compute_eval_metrics",), "what is recorded of an evaluation"),
    **dict.fromkeys(
        ("start_token", "loop_dim", "stop_sequences", "max_tokens", "temperature", "top_k", "top_p"), "generation"
    ),
    **dict.fromkeys(("dtype",), "set by Model Zoo itself; mixed_precision and fp16_type decide"),
}
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

MOE_IGNORED = {
    **dict.fromkeys(("load_balancing_loss_coef", "null_expert_bias"), "scalars of the router"),
    **dict.fromkeys(("gate_initializer", "sinkhorn_n_iters"), "values of the router"),
    **dict.fromkeys(
        (
            *("router_fp32", "router_selection_nonlinearity", "expert_weighting_nonlinearity"),
            "probability_before_ffn",
        ),
        "work for each token and expert, which is small beside the experts",
    ),
    **dict.fromkeys(("moe_implementation", "moe_optimized_impl"), "how Cerebras computes the experts"),
}
"""Fields of `moe` that change neither time nor memory noticeably, and why."""
