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


def test_a_wider_head_counts_beside_the_hidden_size() -> None:
    wide = request({"head_dim": 8})
    parameters = 8 + 8 * (16 + 2 * 8) + 16 * 8
    activations = TOKENS * (4 * 8 + 4 * 16) * 2
    assert moved("attention", wide, backend="flash") == pytest.approx(3 * (2 * activations + 2 * parameters))
    assert flops("attention", wide, backend="flash") == pytest.approx(3 * 2 * TOKENS * parameters + 3.5 * 2 * CORE)


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


def test_the_optimizer_reads_and_writes_the_training_state_once() -> None:
    mixed = 2 * 2 * 4 + (2 * 4 + 2) + 2 * 2
    assert moved("optimizer", micro_batch_size=0) == pytest.approx(TOTAL * mixed)
    plain = request(training={"optimizer": {"name": "sgd", "master_dtype": None}})
    assert moved("optimizer", plain, micro_batch_size=0) == pytest.approx(TOTAL * (2 * 2 + 2 * 2 + 2 * 2))
    assert flops("optimizer", micro_batch_size=0) == pytest.approx(0, abs=1e-6)
    sharded = request(num_devices=4)
    assert moved("optimizer", sharded, micro_batch_size=0, sharding="zero1") == pytest.approx(TOTAL * mixed / 4)


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
