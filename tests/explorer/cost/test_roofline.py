"""Roofline seconds of every kind of component, from operations and bytes that are counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.roofline import PredictedSeconds, roofline_seconds
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import DType
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost.tiny import (
    ATTENTION,
    BANDWIDTH,
    FFN,
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


SCORES = 3 * 16 * 16
CORE = 2 * SCORES * 8  # causal attention: half of four operations for each pair and number of the width
PROJECTED = 2 * TOKENS * ATTENTION


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
