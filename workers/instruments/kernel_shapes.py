"""The shapes of a `ModelSpec`, as the kernels take them."""

from __future__ import annotations

import torch

from bexp.explorer.model.model import DType, ModelSpec
from bexp.kernels.shapes import AttentionShape, ExpertsShape

_TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of `dtype`."""
    return _TORCH_DTYPES[dtype]


def attention_shape(model: ModelSpec) -> AttentionShape:
    """The attention of each layer of `model`."""
    return AttentionShape(
        num_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        head_size=model.head_size,
        dtype=torch_dtype(model.dtype),
        seq_length=model.seq_length,
    )


def experts_shape(model: ModelSpec) -> ExpertsShape | None:
    """The routed experts of `model`; None if it has none."""
    if model.moe is None:
        return None
    return ExpertsShape(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.moe.expert_ffn_hidden_size,
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        dtype=torch_dtype(model.dtype),
        gated=model.gated_mlp,
        activation=model.activation,
    )
