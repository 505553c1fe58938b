"""Shares of token-expert pairs that experts with a capacity drop, and what follows for rows and operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.activation_memory import rows_of_pair
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.model.model import MoESpec
from bexp.explorer.model.routes import draw_routes, dropped_share
from bexp.explorer.model.routing import RoutingSpec
from bexp.explorer.request.request import ExplorationRequest

ZIPF = RoutingSpec(kind="zipf")


def moe(factor: float | None, **fields: Any) -> MoESpec:
    return MoESpec(**{"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 64, "capacity_factor": factor, **fields})


def test_what_is_over_the_capacity_is_dropped_pair_by_pair() -> None:
    """Tokens come in their order, and an expert takes pairs until it is full: 1.25 times 2 x 3000 / 8 is 937.5."""
    room = dict.fromkeys(range(8), 938)
    dropped = 0
    for expert in draw_routes(moe(None), ZIPF, 4096, np.random.default_rng(5))[:3000].ravel().tolist():
        dropped += room[expert] == 0
        room[expert] = max(0, room[expert] - 1)
    assert dropped > 600
    assert dropped_share(moe(1.25), ZIPF, 3000, 5) == pytest.approx(dropped / 6000)


@pytest.mark.parametrize("num_tokens", [60_000, 100_000, 200_000])
def test_many_tokens_drop_what_the_shares_of_zipf_are_over_the_capacity(num_tokens: int) -> None:
    """1/k over the sum of 1 to 1/8, 2.718: the first two experts get 36.8% and 18.4% where 15.6% fit."""
    found = dropped_share(moe(1.25, top_k=1), ZIPF, num_tokens, 5)
    assert found == pytest.approx(0.3679 + 0.1840 - 2 * 0.15625, abs=0.005)


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


def component(backend: str, factor: float | None) -> Component:
    return Component(kind=ComponentKind.MOE_FFN, micro_batch_size=8, backend=backend, capacity_factor=factor)


def request_with(factor: float | None) -> ExplorationRequest:
    model = {
        **{"num_layers": 2, "hidden_size": 512, "num_attention_heads": 4, "vocab_size": 128, "seq_length": 512},
        "moe": moe(factor, expert_ffn_hidden_size=1024).model_dump(),
    }
    shares = (0.375, *[0.625 / 7] * 7)
    return ExplorationRequest.model_validate({"model": model, "routing": {"kind": "shares", "shares": shares}})
