"""A small model of the same kind as another, which has as many parameter tensors in each layer."""

from __future__ import annotations

from bexp.explorer.spec.model import ModelSpec

NUM_LAYERS = 4
WIDTH, HEADS, TOKENS, WORDS = 64, 2, 16, 64
"""Sizes of the miniature. A head is 32 wide, so that rotary embeddings work."""


def miniature_of(model: ModelSpec) -> ModelSpec:
    """Return a small model of the same kind. Its FFNs are dense, because experts have as few parameter tensors."""
    sizes = {
        "num_layers": NUM_LAYERS,
        "hidden_size": WIDTH,
        "ffn_hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": HEADS if model.query_groups == model.num_attention_heads else 1,
        "head_dim": WIDTH // HEADS,
        "rotary_fraction": 1.0,
        "vocab_size": WORDS,
        "seq_length": TOKENS,
        "max_position_embeddings": None,
        "moe": None,
    }
    return ModelSpec.model_validate(model.model_dump() | sizes)
