"""Predicted bytes of every kind of component, counted by hand for three sequences of 16 tokens and width 8.

`tests/workers/profiler/test_activation_memory.py` compares the same predictions with what torch holds.
"""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.activation_memory import (
    OPTIMIZER_BUCKET_BYTES,
    local_length,
    local_tokens,
    predict_component_bytes,
)
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentBytes, ComponentKind
from bexp.explorer.cost.part_costs import predict_part_bytes
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost.tiny import MOE, model_of, parts, request

HIDDEN = 3 * 16 * 8 * 2  # bytes of the block's input, of its output, and of its queries: 768
KEY = HIDDEN // 2  # one of two heads
PROJECTIONS = HIDDEN + 2 * KEY
LOG_SUMS = 3 * 16 * 2 * 4  # a float32 for each token and head
SCORES = LOG_SUMS * 16
WIDE = 2 * HIDDEN  # the FFN's hidden activations
ROUTER = 48 * 4 * 4 + 96 * (3 * 8 + 2)
SHARED: dict[str, Any] = {"context_parallel_size": 2, "context_parallel_layout": "zigzag"}


def predict(kind: str, req: ExplorationRequest | None = None, **changes: Any) -> ComponentBytes:
    req = req or request(routing={"kind": "uniform"})
    component = Component.model_validate({"kind": kind, "micro_batch_size": 3, **changes})
    return predict_component_bytes(component, model_of(req), req)


def moe(routing: dict[str, Any] | None = None, mode: str = "train", **changes: Any) -> ExplorationRequest:
    return request({"moe": {**MOE, **changes}}, routing=routing or {"kind": "uniform"}, mode=mode)


def test_a_device_has_its_share_of_each_sequence() -> None:
    model = model_of(request())
    shared = Component.model_validate({"kind": "attention", "micro_batch_size": 3, **SHARED})
    assert (local_length(shared, model), local_tokens(shared, model)) == (8, 24)


def test_plain_attention_keeps_scores_and_copies_in_float32() -> None:
    core = SCORES + 3 * 1536
    saved = 3 * HIDDEN + core
    found = predict("attention", backend="math")
    assert found == ComponentBytes(saved, saved + HIDDEN + SCORES, saved + 2 * PROJECTIONS + SCORES)


def test_plain_attention_that_is_recomputed_has_its_scores_twice() -> None:
    saved = 3 * HIDDEN + PROJECTIONS
    core = SCORES + 3 * 1536
    found = predict("attention", backend="math", recompute="selective")
    expected = ComponentBytes(saved, saved + HIDDEN + 2 * SCORES, saved + core + 2 * PROJECTIONS + SCORES)
    assert found == expected


def test_efficient_attention_repeats_keys_and_values_for_every_head() -> None:
    flash, efficient = (predict("attention", backend=name) for name in ("flash", "efficient"))
    assert efficient.saved - flash.saved == 2 * HIDDEN
    alike = request({"num_query_groups": 2})
    assert predict("attention", alike, backend="efficient") == predict("attention", alike, backend="flash")


def test_a_variants_query_groups_take_the_place_of_the_models() -> None:
    more = predict("attention", backend="flash", num_query_groups=2)
    assert more == predict("attention", request({"num_query_groups": 2}), backend="flash")
    assert more.saved - predict("attention", backend="flash").saved == 2 * KEY


def test_normed_queries_and_keys_are_kept_beside_the_plain_ones() -> None:
    normed = request({"qk_norm": "head"})
    plain, found = predict("attention", backend="flash"), predict("attention", normed, backend="flash")
    assert found.saved - plain.saved == HIDDEN + KEY
    math, found = predict("attention", backend="math"), predict("attention", normed, backend="math")
    assert found.saved - math.saved == PROJECTIONS, "its copies are of the normed ones"
    again = predict("attention", normed, backend="math", recompute="selective")
    assert again.saved - predict("attention", backend="math", recompute="selective").saved == HIDDEN + KEY


def test_tiles_leave_their_outputs_and_one_tile_is_alive() -> None:
    whole = predict("attention", backend="flash")
    found = predict("attention", backend="flash", bta_tile=1)
    assert found == ComponentBytes(HIDDEN, HIDDEN + whole.forward_peak // 3, HIDDEN + whole.backward_peak // 3)
    many = predict("attention", backend="flash", micro_batch_size=8, bta_tile=1)
    assert many.forward_peak == 2 * many.saved == 2 * 2048, "the outputs and their concatenation"


def test_a_ring_adds_the_pairs_that_pass_and_sums_in_float32() -> None:
    query, key = HIDDEN // 2, KEY // 2
    found = predict("attention", backend="flash", **SHARED)
    saved = 4224 // 2
    assert found == ComponentBytes(
        saved,
        saved + query + 4 * key + 2 * query,
        saved + PROJECTIONS // 2 + query + 4 * key + 2 * (query + 4 * key),
    )


def test_a_ring_of_plain_attention_has_the_scores_of_one_block() -> None:
    flash, math = (predict("attention", backend=name, **SHARED) for name in ("flash", "math"))
    block = 3 * 2 * 8 * 8 * 4
    assert math.saved == flash.saved, "the scores are computed again"
    assert math.forward_peak - flash.forward_peak == 2 * block
    assert math.backward_peak - flash.backward_peak == 2 * block + PROJECTIONS // 2 - HIDDEN // 2


def test_a_plain_ffn_keeps_less_and_relu_its_result_alone() -> None:
    silu, relu = (request({"gated_mlp": False, "activation": name}) for name in ("silu", "relu"))
    assert predict("dense_ffn", silu) == ComponentBytes(2 * HIDDEN + 2 * WIDE, 3 * HIDDEN + 2 * WIDE, HIDDEN + 4 * WIDE)
    assert predict("dense_ffn", relu) == ComponentBytes(2 * HIDDEN + WIDE, 3 * HIDDEN + WIDE, HIDDEN + 3 * WIDE)
    assert predict("dense_ffn", silu, recompute="activations").saved == HIDDEN + WIDE
    assert predict("dense_ffn", relu, recompute="projections").saved == HIDDEN + WIDE


@pytest.mark.parametrize(
    ("backend", "rows", "kept"),
    [("grouped_mm", 96, 1), ("fused", 96, 0)],
)
def test_experts_keep_rows_in_and_between_their_products(backend: str, rows: int, kept: int) -> None:
    gathered, wide = rows * 8 * 2, rows * 4 * 2
    between = HIDDEN + (gathered + kept * wide if kept else 0)
    saved = between + 2 * wide + HIDDEN + ROUTER
    expected = ComponentBytes(saved, saved + 2 * gathered, saved + 2 * gathered + 3 * wide)
    assert predict("moe_ffn", moe(), backend=backend) == expected
    kept_alone = predict("moe_ffn", moe(), backend=backend, recompute="projections")
    assert kept_alone == ComponentBytes(HIDDEN + ROUTER, expected.forward_peak, expected.backward_peak)
    assert predict("moe_ffn", moe(), backend=backend, recompute="activations").saved == saved - between


def test_shared_experts_are_an_mlp_beside_the_routed_ones() -> None:
    plain, wide = predict("moe_ffn", moe(), backend="fused"), 48 * 4 * 2
    shared = predict("moe_ffn", moe(shared_expert_ffn_hidden_size=4), backend="fused")
    gated = predict("moe_ffn", moe(shared_expert_ffn_hidden_size=4, shared_expert_gate=True), backend="fused")
    assert shared.saved - plain.saved == 3 * wide
    assert gated.saved - shared.saved == HIDDEN
    again = predict("moe_ffn", moe(shared_expert_ffn_hidden_size=4), backend="fused", recompute="projections")
    assert again.saved == HIDDEN + ROUTER
    relu = {"moe": {**MOE, "shared_expert_ffn_hidden_size": 4}, "gated_mlp": False, "activation": "relu"}
    found = predict("moe_ffn", request(relu, routing={"kind": "uniform"}), backend="fused", recompute="projections")
    assert found.saved == HIDDEN + ROUTER + wide, "backward asks for the shared experts' result"


def test_the_full_loss_keeps_logits_and_their_copy_in_float32() -> None:
    logits = 48 * 32
    saved = HIDDEN + 6 * logits
    found = predict("head", request(training={"loss": {"kind": "full"}}))
    assert found == ComponentBytes(saved, saved + 4 * logits, saved + 6 * logits)


def test_the_chunked_loss_keeps_gradients_and_has_one_chunk_of_logits() -> None:
    weight, chunk = 32 * 8 * 2, 48 * 32 * 12
    expected = ComponentBytes(2 * HIDDEN + weight, 2 * HIDDEN + weight + chunk, 3 * HIDDEN + weight + chunk)
    assert predict("head") == expected, "all tokens are one chunk"
    req = request(training={"loss": {"chunk_tokens": 128}})
    found = predict("head", req, micro_batch_size=16)
    assert found.forward_peak - found.saved == 128 * 32 * 12


def test_the_embedding_leaves_its_output_and_learned_positions_double_it() -> None:
    assert predict("embedding") == ComponentBytes(HIDDEN, HIDDEN, HIDDEN)
    learned = request({"position": "learned"})
    assert predict("embedding", learned) == ComponentBytes(HIDDEN, 2 * HIDDEN, HIDDEN)


def test_the_optimizer_converts_its_largest_block_at_a_time() -> None:
    ffn, experts = 392, 424
    assert predict("optimizer", micro_batch_size=0) == ComponentBytes(0, 0, 4 * ffn)
    assert predict("optimizer", moe(), micro_batch_size=0) == ComponentBytes(0, 0, 4 * experts)
    assert predict("optimizer", request({"dtype": "float32"}), micro_batch_size=0) == ComponentBytes(0, 0, 0)
    large = request({"vocab_size": 1 << 24})
    assert predict("optimizer", large, micro_batch_size=0).backward_peak == OPTIMIZER_BUCKET_BYTES == 256 * 2**20
    head = request({"vocab_size": 100})
    assert predict("optimizer", head, micro_batch_size=0).backward_peak == 4 * (100 * 8 + 8)
    wide = request({"head_dim": 32})
    assert predict("optimizer", wide, micro_batch_size=0).backward_peak == 4 * (8 + 8 * 128 + 64 * 8)
    tied = request({"vocab_size": 100, "tie_embeddings": True})
    assert predict("optimizer", tied, micro_batch_size=0).backward_peak == 4 * 100 * 8


def test_sharding_divides_what_the_optimizer_converts() -> None:
    req = request(num_devices=5, batch_size=5)
    assert predict("optimizer", req, micro_batch_size=0, sharding="zero1").backward_peak == 4 * 392 // 5
    assert predict("optimizer", req, micro_batch_size=0, sharding="none").backward_peak == 4 * 392


def test_communication_holds_no_activations() -> None:
    assert predict("communication", micro_batch_size=0) == ComponentBytes(0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ({"backend": "flash"}, 2 * HIDDEN + 2 * KEY + HIDDEN + KEY),
        ({"backend": "flash", "bta_tile": 1}, (3 * HIDDEN + 3 * KEY) // 3 + HIDDEN),
        ({"backend": "math"}, 2 * HIDDEN + 2 * KEY + HIDDEN + 2 * SCORES),
        ({"backend": "flash", "num_query_groups": 2}, 2 * HIDDEN + 4 * KEY + HIDDEN + 2 * KEY),
        ({"backend": "flash", **SHARED}, (3 * HIDDEN + 3 * KEY) // 2 + 4 * KEY // 2 + 2 * HIDDEN // 2),
    ],
)
def test_attention_without_backward_has_neighbours_alone(changes: dict[str, Any], peak: int) -> None:
    found = predict("attention", request(mode="eval"), **changes)
    assert found == ComponentBytes(HIDDEN // changes.get("context_parallel_size", 1), peak, 0)


def test_the_loss_without_backward_is_chunked_unless_it_is_full() -> None:
    chunked, full = (
        request(mode="eval", training={"loss": {"kind": kind, "chunk_tokens": 128}}) for kind in ("chunked", "full")
    )
    hidden = 16 * 16 * 8 * 2
    assert predict("head", chunked, micro_batch_size=16) == ComponentBytes(0, hidden + 128 * 32 * 6, 0)
    assert predict("head", full, micro_batch_size=16) == ComponentBytes(0, hidden + 256 * 32 * 6, 0)
    assert predict("head", chunked).forward_peak == HIDDEN + 48 * 32 * 6


def test_a_model_in_parts_is_predicted_by_its_parts() -> None:
    component = Component(kind=ComponentKind.LAYER, part="only", micro_batch_size=3, recompute=BlockRecompute.NONE)
    found = predict_component_bytes(component, parts(), request())
    assert found == predict_part_bytes(component, parts(), request())
    assert found.saved == 48 * 64
