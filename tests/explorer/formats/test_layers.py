from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from bexp.explorer.model.model import LayerKind, ModelSpec, MoESpec, find_layer_pattern


@given(count=st.integers(1, 24), first=st.integers(0, 24), frequency=st.integers(1, 8))
def test_every_pattern_that_a_model_can_have_is_found(count: int, first: int, frequency: int) -> None:
    assume(first + frequency <= count)  # there is a layer with experts
    moe = MoESpec(num_experts=2, top_k=1, expert_ffn_hidden_size=8, first_k_dense=first, moe_layer_frequency=frequency)
    model = ModelSpec(
        num_layers=count, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, vocab_size=8, seq_length=8, moe=moe
    )
    has_experts = [kind is LayerKind.MOE for kind in model.layer_kinds]
    pattern = find_layer_pattern(has_experts)
    assert pattern is not None
    found = moe.model_copy(update={"first_k_dense": pattern[0], "moe_layer_frequency": pattern[1]})
    assert model.model_copy(update={"moe": found}).layer_kinds == model.layer_kinds


def test_what_no_model_can_have_is_not_found() -> None:
    assert find_layer_pattern([True, False, False]) is None
    assert find_layer_pattern([True, True, False, True]) is None
