"""Roofline seconds of every kind of component, from operations and bytes that are counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.roofline import (
    PredictedSeconds,
    roofline_seconds,
)
from bexp.explorer.dimensions.context_parallel import Sharing, busiest_pairs
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import DType
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost.tiny import (
    ATTENTION,
    BANDWIDTH,
    FFN,
    HEAD,
    LAUNCH_SECONDS,
    MOE,
    PEAK_FLOPS,
    TOTAL,
    hardware,
    model_of,
    parts,
    request,
    request_of_parts,
)

TOKENS = 48
ARITHMETIC = hardware(memory_bandwidth_bytes_per_second=1e30)
"""A device whose operations alone take time."""
MEMORY = hardware(matmul_flops_per_second={DType.BFLOAT16: 1e30})
"""A device whose bytes alone take time."""


def predict(
    kind: str, req: ExplorationRequest | None = None, device: HardwareSpec | None = None, **changes: Any
) -> PredictedSeconds:
    req = req or request(routing={"kind": "uniform"})
    component = Component.model_validate({"kind": kind, "micro_batch_size": 3, **changes})
    return roofline_seconds(component, model_of(req), req, device or hardware())


def flops(kind: str, req: ExplorationRequest | None = None, **changes: Any) -> float:
    return predict(kind, req, ARITHMETIC, **changes).device * PEAK_FLOPS


def moved(kind: str, req: ExplorationRequest | None = None, **changes: Any) -> float:
    return predict(kind, req, MEMORY, **changes).device * BANDWIDTH


def saved(kind: str, req: ExplorationRequest, **changes: Any) -> int:
    component = Component.model_validate({"kind": kind, "micro_batch_size": 3, **changes})
    return predict_component_bytes(component, model_of(req), req).saved


def launches(kind: str, req: ExplorationRequest | None = None, **changes: Any) -> float:
    return predict(kind, req, **changes).host / LAUNCH_SECONDS


def test_a_format_that_was_not_measured_is_taken_at_the_fastest_peak() -> None:
    peaks = {DType.FLOAT32: 1e12, DType.BFLOAT16: 4e12}
    device = hardware(memory_bandwidth_bytes_per_second=1e30, matmul_flops_per_second=peaks)
    found = {
        name: predict("dense_ffn", request({"dtype": name}), device).device
        for name in ("float32", "bfloat16", "float16")
    }
    assert found["float32"] == pytest.approx(4 * found["bfloat16"])
    assert found["float16"] == pytest.approx(found["bfloat16"])


def test_an_ffn_multiplies_every_parameter_once_forward_and_twice_back() -> None:
    assert flops("dense_ffn") == pytest.approx(3 * 2 * TOKENS * FFN)
    assert moved("dense_ffn") == pytest.approx(3 * (2 * saved("dense_ffn", request()) + 2 * FFN))
    assert flops("dense_ffn", request(mode="eval")) == pytest.approx(2 * TOKENS * FFN)


def test_the_head_multiplies_by_the_vocabulary_and_moves_logits_three_times() -> None:
    assert flops("head") == pytest.approx(3 * 2 * TOKENS * 8 * 32)
    expected = 2 * saved("head", request()) + 3 * TOKENS * 32 * 4 + 2 * HEAD
    assert moved("head") == pytest.approx(3 * expected)


def test_the_embedding_moves_bytes_alone() -> None:
    assert flops("embedding") == pytest.approx(0, abs=1e-6)
    assert moved("embedding") == pytest.approx(3 * 2 * saved("embedding", request()))


def test_of_the_experts_those_that_a_token_meets_are_computed() -> None:
    req = request({"moe": MOE}, routing={"kind": "uniform"})
    expert = 3 * 8 * 4
    active = 8 + 8 * 4 + 2 * expert
    assert flops("moe_ffn", req, backend="loop") == pytest.approx(3 * 2 * TOKENS * active)
    expected = 2 * saved("moe_ffn", req, backend="loop") + 2 * (8 + 8 * 4 + 4 * expert)
    assert moved("moe_ffn", req, backend="loop") == pytest.approx(3 * expected)
    ungated = request({"moe": MOE, "gated_mlp": False}, routing={"kind": "uniform"})
    assert flops("moe_ffn", ungated, backend="loop") == pytest.approx(3 * 2 * TOKENS * (8 + 8 * 4 + 2 * 2 * 8 * 4))


def test_bmm_computes_what_pads_every_expert_to_the_largest() -> None:
    even, uneven = (
        request({"moe": MOE}, routing=routing)
        for routing in ({"kind": "uniform"}, {"kind": "shares", "shares": [4, 2, 2, 2]})
    )
    assert flops("moe_ffn", even, backend="bmm") == pytest.approx(flops("moe_ffn", even, backend="loop"))
    assert flops("moe_ffn", uneven, backend="bmm") == pytest.approx(1.6 * flops("moe_ffn", even, backend="loop"))
    assert flops("moe_ffn", uneven, backend="loop") == pytest.approx(flops("moe_ffn", even, backend="loop"))


SCORES = 3 * 16 * 16
CORE = 2 * SCORES * 8  # causal attention: half of four operations for each pair and number of the width
PROJECTED = 2 * TOKENS * ATTENTION
ACTIVATIONS = TOKENS * (4 * 8 + 4 * 8) * 2


def test_fused_attention_recomputes_its_scores_in_backward() -> None:
    assert flops("attention", backend="flash") == pytest.approx(3 * PROJECTED + (1 + 2.5) * CORE)
    assert moved("attention", backend="flash") == pytest.approx(3 * (2 * ACTIVATIONS + 2 * ATTENTION))


def test_plain_attention_computes_all_scores_and_moves_them() -> None:
    core = 4 * SCORES * 8
    assert flops("attention", backend="math") == pytest.approx(3 * (PROJECTED + core))
    scores = 8 * SCORES * 2 * 4
    assert moved("attention", backend="math") == pytest.approx(3 * (2 * ACTIVATIONS + 2 * ATTENTION + scores))


def test_a_wider_head_counts_beside_the_hidden_size() -> None:
    wide = request({"head_dim": 8})
    parameters = 8 + 8 * (16 + 2 * 8) + 16 * 8
    activations = TOKENS * (4 * 8 + 4 * 16) * 2
    assert moved("attention", wide, backend="flash") == pytest.approx(3 * (2 * activations + 2 * parameters))
    assert flops("attention", wide, backend="flash") == pytest.approx(3 * 2 * TOKENS * parameters + 3.5 * 2 * CORE)


def test_each_tile_reads_the_parameters_again() -> None:
    found = moved("attention", backend="flash", bta_tile=1)
    forward = 2 * ACTIVATIONS + 3 * 2 * ATTENTION
    assert found == pytest.approx(4 * forward), "a tile is computed again in backward"


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"recompute": "selective"}, CORE),
        ({"recompute": "activations"}, 0),
        ({"recompute": "projections"}, PROJECTED * (2 + 2 * 1) / (2 + 2 * 1 + 2)),
        ({"recompute": "projections", "num_query_groups": 2}, PROJECTED * (2 + 2 * 2) / (2 + 2 * 2 + 2)),
        ({"recompute": "full"}, PROJECTED + CORE),
        ({"bta_tile": 1}, PROJECTED + CORE),
        ({"bta_tile": 1, "recompute": "full"}, 2 * (PROJECTED + CORE)),
    ],
)
def test_what_attention_computes_again(changes: dict[str, Any], more: float) -> None:
    plain = 3 * PROJECTED + 3.5 * CORE
    assert flops("attention", backend="flash", **changes) - plain == pytest.approx(more, abs=1e-3)


def test_recomputation_by_operation_moves_half_of_what_a_forward_pass_moves() -> None:
    plain = moved("dense_ffn")
    for policy in ("activations", "projections"):
        assert moved("dense_ffn", recompute=policy) == pytest.approx(plain * (3 + 0.5) / 3)
    assert moved("attention", backend="flash", recompute="selective") == moved("attention", backend="flash")
    assert moved("dense_ffn", recompute="full") == pytest.approx(plain * 4 / 3)
    attention: dict[str, Any] = {"backend": "flash", "bta_tile": 3}
    both = moved("attention", recompute="full", **attention) - moved("attention", **attention)
    assert both == pytest.approx(2 * ACTIVATIONS + 2 * ATTENTION)


def test_an_ffn_computes_again_two_of_three_matrices_or_one_of_two() -> None:
    forward = 2 * TOKENS * FFN
    assert flops("dense_ffn", recompute="projections") == pytest.approx(forward * (3 + 2 / 3))
    ungated = request({"gated_mlp": False})
    assert flops("dense_ffn", ungated, recompute="projections") == pytest.approx(2 * TOKENS * (8 + 2 * 8 * 16) * 3.5)
    assert flops("dense_ffn", recompute="activations") == pytest.approx(forward * 3)


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_a_ring_takes_as_long_as_its_busiest_device_and_merges_blocks(backend: str) -> None:
    shared: dict[str, Any] = {"backend": backend, "context_parallel_size": 2, "context_parallel_layout": "ring"}
    pairs = busiest_pairs(Sharing(2, "ring"), 16)
    projected, merged = 2 * 24 * ATTENTION, 2 * 24 * 8 * (2 * 4 + 2)
    if backend == "math":
        core, scores = 4 * 3 * pairs.scored * 8, 8 * 3 * pairs.scored * 2 * 4
        assert flops("attention", **shared) == pytest.approx(3 * (projected + core))
    else:
        core, scores = 4 * 3 * pairs.attended * 8, 0
        assert flops("attention", **shared) == pytest.approx(3 * projected + 3.5 * core)
    expected = 2 * ACTIVATIONS / 2 + 2 * ATTENTION + scores + merged
    assert moved("attention", **shared) == pytest.approx(3 * expected)


def test_a_host_launches_one_pass_without_training_and_thirty_operations_for_experts() -> None:
    assert launches("dense_ffn", request(mode="eval")) == pytest.approx(8)
    req = request({"moe": MOE}, routing={"kind": "uniform"})
    assert launches("moe_ffn", req, backend="loop") == pytest.approx(30 * 3)


def test_the_optimizer_reads_and_writes_the_training_state_once() -> None:
    mixed = 2 * 2 * 4 + (2 * 4 + 2) + 2 * 2
    assert moved("optimizer", micro_batch_size=0) == pytest.approx(TOTAL * mixed)
    plain = request(training={"optimizer": {"name": "sgd", "master_dtype": None}})
    assert moved("optimizer", plain, micro_batch_size=0) == pytest.approx(TOTAL * (2 * 2 + 2 * 2 + 2 * 2))
    assert flops("optimizer", micro_batch_size=0) == pytest.approx(0, abs=1e-6)
    sharded = request(num_devices=4)
    assert moved("optimizer", sharded, micro_batch_size=0, sharding="zero1") == pytest.approx(TOTAL * mixed / 4)


def predict_part(kind: str, req: ExplorationRequest | None = None, **changes: Any) -> PredictedSeconds:
    part = "only" if kind == "layer" else None
    component = Component.model_validate({"kind": kind, "part": part, "micro_batch_size": 3, **changes})
    return roofline_seconds(component, parts(), req or request(), ARITHMETIC)


def test_parts_take_a_forward_a_backward_and_what_runs_again() -> None:
    forward = TOKENS * 200.0
    assert predict_part("layer").device * PEAK_FLOPS == pytest.approx(3 * forward)
    assert predict_part("layer", recompute="full").device * PEAK_FLOPS == pytest.approx(4 * forward)
    assert predict_part("layer", request(mode="eval")).device * PEAK_FLOPS == pytest.approx(forward)
    assert predict_part("shell").device * PEAK_FLOPS == pytest.approx(3 * TOKENS * 100.0)
    moving = roofline_seconds(
        Component.model_validate({"kind": "layer", "part": "only", "micro_batch_size": 3}), parts(), request(), MEMORY
    )
    assert moving.device * BANDWIDTH == pytest.approx(3 * (200 + 2 * TOKENS * 64))


def test_the_optimizer_of_a_models_own_code_moves_what_is_trained() -> None:
    component = Component.model_validate({"kind": "optimizer", "micro_batch_size": 0})
    found = roofline_seconds(component, parts(), request(), MEMORY)
    assert found.device * BANDWIDTH == pytest.approx((2 + 2 * 2 + 1) * 220)


def test_the_optimizer_beside_master_weights_moves_what_the_reference_layers_do_and_clips() -> None:
    component = {"kind": "optimizer", "micro_batch_size": 0}
    numbers, converted = 220 // 2, 4 + 4
    read_and_written = 2 * (4 + 4 + 4) + 2 + 2
    master = {"precision": "master"}
    alone, shared = request_of_parts(training=master), request_of_parts(num_devices=4, training=master)
    found = roofline_seconds(Component.model_validate(component), parts(), alone, MEMORY)
    assert found.device * BANDWIDTH == pytest.approx(numbers * (read_and_written + converted))
    sharded = Component.model_validate({**component, "sharding": "zero1"})
    of_one = roofline_seconds(sharded, parts(), shared, MEMORY)
    assert of_one.device == pytest.approx(found.device / 4)
