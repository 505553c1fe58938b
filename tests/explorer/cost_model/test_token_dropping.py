"""Shares of token-expert pairs that experts with a capacity drop, and what follows for rows and operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost_model.activation_memory import rows_of_pair
from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.cost_model.roofline import predict_component_seconds
from bexp.explorer.cost_model.token_dropping import dropped_share
from bexp.explorer.spec.model import MoESpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.routes import draw_routes
from bexp.explorer.spec.routing import RoutingSpec
from tests.contracts.samples import make_report

ZIPF = RoutingSpec(kind="zipf")


def moe(factor: float | None, **fields: Any) -> MoESpec:
    return MoESpec(**{"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 64, "capacity_factor": factor, **fields})


@pytest.mark.parametrize("num_tokens", [3000, 100_000])
def test_what_is_over_the_capacity_is_dropped(num_tokens: int) -> None:
    drawn = draw_routes(moe(None), ZIPF, 4096 if num_tokens == 3000 else 65536, np.random.default_rng(5))
    counts = np.bincount(np.resize(drawn, (num_tokens, 2)).ravel(), minlength=8)
    capacity = int(np.ceil(num_tokens * 2 / 8 * 1.25))
    expected = np.maximum(counts - capacity, 0).sum() / (2 * num_tokens)
    assert dropped_share(moe(1.25), ZIPF, num_tokens, 5) == pytest.approx(expected)
    assert expected > 0.1


def test_a_large_capacity_or_none_drops_nothing() -> None:
    assert dropped_share(moe(8.0), ZIPF, 1000, 0) == 0.0
    assert dropped_share(moe(None), ZIPF, 1000, 0) == 0.0


def test_all_pairs_but_the_capacity_of_one_expert_are_dropped() -> None:
    routing = RoutingSpec(kind="shares", shares=(1, 0, 0, 0, 0, 0, 0, 0))
    assert dropped_share(moe(1.0, top_k=1), routing, 800, 0) == pytest.approx(1 - 1 / 8)


@pytest.mark.parametrize(
    ("backend", "factor", "rows"), [("loop", None, 1.0), ("bmm", None, 3.0), ("bmm", 1.5, 1.5), ("bmm", 0.5, 0.5)]
)
def test_rows_of_a_pair(backend: str, factor: float | None, rows: float) -> None:
    request = request_with(factor)
    assert rows_of_pair(component(backend, factor), request.shapes, request) == pytest.approx(rows, rel=0.1)


def test_experts_that_drop_tokens_are_predicted_to_take_less_time() -> None:
    seconds = []
    for factor in (None, 0.5):
        request = request_with(factor)
        found = predict_component_seconds(component("loop", factor), request.shapes, request, make_report().hardware)
        seconds.append(found.device)
    assert seconds[1] < 0.9 * seconds[0]


def component(backend: str, factor: float | None) -> Component:
    return Component(kind=ComponentKind.MOE_FFN, micro_batch_size=8, backend=backend, capacity_factor=factor)


def request_with(factor: float | None) -> ExplorationRequest:
    model = {
        **{"num_layers": 2, "hidden_size": 512, "num_attention_heads": 4, "vocab_size": 128, "seq_length": 512},
        "moe": moe(factor, expert_ffn_hidden_size=1024).model_dump(),
    }
    shares = (0.375, *[0.625 / 7] * 7)
    return ExplorationRequest.model_validate({"model": model, "routing": {"kind": "shares", "shares": shares}})
