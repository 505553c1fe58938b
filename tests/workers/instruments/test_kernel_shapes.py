from __future__ import annotations

import torch

from bexp.kernels.shapes import AttentionShape, ExpertsShape
from bexp.workers.instruments.kernel_shapes import attention_shape, experts_shape
from tests.workers.targets.reference.models import small_model, small_moe


def test_the_kernels_shapes_are_the_models() -> None:
    model = small_model(num_query_groups=2, moe=small_moe(), dtype="bfloat16", gated_mlp=False, activation="gelu")
    assert model.moe is not None
    assert attention_shape(model) == AttentionShape(
        num_heads=model.num_attention_heads,
        num_query_groups=2,
        head_size=model.head_size,
        dtype=torch.bfloat16,
        seq_length=model.seq_length,
    )
    assert experts_shape(model) == ExpertsShape(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.moe.expert_ffn_hidden_size,
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        dtype=torch.bfloat16,
        gated=False,
        activation="gelu",
    )


def test_a_model_without_experts_has_no_shape_of_experts() -> None:
    assert experts_shape(small_model()) is None
