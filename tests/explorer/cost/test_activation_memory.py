"""Predicted bytes of what is neither weighed nor recorded, by hand for three sequences of 16 tokens and width 8.

`tests/workers/profiler/test_activation_memory.py` compares predictions with what torch holds, and `test_recorded_costs`
has those of whole models.
"""

from __future__ import annotations

from typing import Any

from bexp.explorer.cost.activation_memory import OPTIMIZER_BUCKET_BYTES, predict_component_bytes
from bexp.explorer.cost.components import Component, ComponentBytes
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost.tiny import MOE, model_of, request

HIDDEN = 3 * 16 * 8 * 2  # bytes of the block's input, of its output, and of its queries: 768
KEY = HIDDEN // 2  # one of two heads
PROJECTIONS = HIDDEN + 2 * KEY
WIDE = 2 * HIDDEN  # the FFN's hidden activations


def predict(kind: str, req: ExplorationRequest | None = None, **changes: Any) -> ComponentBytes:
    req = req or request(routing={"kind": "uniform"})
    component = Component.model_validate({"kind": kind, "micro_batch_size": 3, **changes})
    return predict_component_bytes(component, model_of(req), req)


def moe(routing: dict[str, Any] | None = None, mode: str = "train", **changes: Any) -> ExplorationRequest:
    return request({"moe": {**MOE, **changes}}, routing=routing or {"kind": "uniform"}, mode=mode)


def test_normed_queries_and_keys_are_kept_beside_the_plain_ones() -> None:
    normed = request({"qk_norm": "head"})
    plain, found = predict("attention", backend="flash"), predict("attention", normed, backend="flash")
    assert found.saved - plain.saved == HIDDEN + KEY
    math, found = predict("attention", backend="math"), predict("attention", normed, backend="math")
    assert found.saved - math.saved == PROJECTIONS, "its copies are of the normed ones"
    again = predict("attention", normed, backend="math", recompute="selective")
    assert again.saved - predict("attention", backend="math", recompute="selective").saved == HIDDEN + KEY


def test_a_plain_ffn_keeps_less_and_relu_its_result_alone() -> None:
    silu, relu = (request({"gated_mlp": False, "activation": name}) for name in ("silu", "relu"))
    assert predict("dense_ffn", silu) == ComponentBytes(2 * HIDDEN + 2 * WIDE, 3 * HIDDEN + 2 * WIDE, HIDDEN + 4 * WIDE)
    assert predict("dense_ffn", relu) == ComponentBytes(2 * HIDDEN + WIDE, 3 * HIDDEN + WIDE, HIDDEN + 3 * WIDE)
    assert predict("dense_ffn", silu, recompute="activations").saved == HIDDEN + WIDE
    assert predict("dense_ffn", relu, recompute="projections").saved == HIDDEN + WIDE


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
