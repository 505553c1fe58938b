from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.model.model import LayerKind, ModelSpec
from tests.explorer.shapes import shapes

SHAPE = shapes(4, 64, 128, heads=4, vocab=100, length=32)
EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 32}


def build(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate({**SHAPE, **changes})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_attention_heads": 5}, "hidden_size (64) must be a multiple of num_attention_heads (5)"),
        ({"num_query_groups": 3}, "num_query_groups (3) must divide num_attention_heads (4)"),
        ({"num_query_groups": 8}, "num_query_groups (8) must divide num_attention_heads (4)"),
        ({"num_query_groups": 0}, "greater than or equal to 1"),
        ({"head_dim": 7}, "rotary part of head_dim (7) must be even"),
        ({"rotary_fraction": 0.2}, "rotary part of head_dim (3) must be even"),
        ({"rotary_fraction": 0.0}, "greater than 0"),
        ({"rotary_fraction": 1.5}, "less than or equal to 1"),
        (
            {"position": "learned", "max_position_embeddings": 16},
            "seq_length (32) exceeds max_position_embeddings (16)",
        ),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size must be given"),
        ({"moe": {**EXPERTS, "first_k_dense": 1}, "ffn_hidden_size": 0}, "ffn_hidden_size must be given"),
        ({"moe": {**EXPERTS, "moe_layer_frequency": 2}, "ffn_hidden_size": 0}, "ffn_hidden_size must be given"),
        ({"moe": {**EXPERTS, "first_k_dense": 5}}, "moe.first_k_dense (5) exceeds num_layers (4)"),
        ({"moe": {**EXPERTS, "top_k": 9}}, "top_k (9) must not exceed num_experts (8)"),
        ({"moe": {**EXPERTS, "top_k": 0}}, "moe.top_k"),
        ({"moe": {**EXPERTS, "num_experts": 1024}}, "moe.num_experts"),
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": 2**21}, "hidden_size"),
        ({"name": "../../etc"}, "name"),
    ],
)
def test_each_rule(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build(**changes)
    assert part in str(caught.value)


def test_groups_and_widths() -> None:
    assert build().query_groups == 4
    assert build(num_query_groups=1).query_groups == 1
    assert build().head_size == 16
    assert build(head_dim=24).head_size == 24
    assert build(rotary_fraction=0.5).rotary_size == 8
    assert build(position="learned").position_rows == 32
    assert build(position="learned", max_position_embeddings=99).position_rows == 99


@pytest.mark.parametrize(
    ("first_k_dense", "frequency", "pattern"),
    [(0, 1, "MMMM"), (1, 1, "DMMM"), (0, 2, "DMDM"), (1, 2, "DDMD"), (0, 3, "DDMD"), (2, 2, "DDDM")],
)
def test_where_the_experts_are(first_k_dense: int, frequency: int, pattern: str) -> None:
    model = build(moe={**EXPERTS, "first_k_dense": first_k_dense, "moe_layer_frequency": frequency})
    assert "".join(kind.name[0] for kind in model.layer_kinds) == pattern
    assert model.count_layers(LayerKind.MOE) == pattern.count("M")
    assert model.count_layers(LayerKind.DENSE) == pattern.count("D")
