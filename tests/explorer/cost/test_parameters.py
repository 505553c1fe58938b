"""Counts by hand; equality with transformers, module by module, is checked with the formats."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.parameters import (
    count_attention,
    count_dense_ffn,
    count_embedding,
    count_head,
    count_layer,
    count_norm,
    count_parameters,
)
from bexp.explorer.model.model import LayerKind, ModelSpec


def build(**changes: Any) -> ModelSpec:
    shape = {
        "num_layers": 3,
        "hidden_size": 10,
        "ffn_hidden_size": 7,
        "num_attention_heads": 5,
        "vocab_size": 11,
        "seq_length": 13,
    }
    return ModelSpec.model_validate({**shape, **changes})


def experts(**changes: Any) -> dict[str, Any]:
    return {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 3, **changes}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 10 + 210),
        ({"gated_mlp": False}, 10 + 140),
        ({"mlp_bias": True}, 10 + 210 + 14 + 10),
        ({"mlp_bias": True, "gated_mlp": False, "norm": "layernorm"}, 20 + 140 + 7 + 10),
    ],
)
def test_dense_ffn(changes: dict[str, Any], count: int) -> None:
    assert count_dense_ffn(build(**changes)) == count


@pytest.mark.parametrize("moe", [None, experts(), experts(first_k_dense=1), experts(moe_layer_frequency=3)])
def test_the_whole_is_the_sum_of_its_parts(moe: dict[str, Any] | None) -> None:
    model = build(moe=moe)
    layers = sum(count_layer(model, kind) for kind in model.layer_kinds)
    assert count_parameters(model) == count_embedding(model) + layers + count_head(model)
    assert count_layer(model, LayerKind.DENSE) == count_attention(model) + count_dense_ffn(model)
    assert count_norm(model) == 10


def test_parallel_residuals_keep_both_norms() -> None:
    assert count_parameters(build(parallel_residual=True)) == count_parameters(build())
