"""Expert modes: what runs beside what, the rows that shadowed experts leave, and what that costs a block."""

from __future__ import annotations

import math

import pytest

from bexp.explorer.meshes.layers import ExpertOverlap, run_overlapped
from bexp.explorer.meshes.shards import busiest_device
from bexp.explorer.meshes.transfers import Transfer
from bexp.explorer.model.model import MoESpec
from bexp.explorer.model.routing import RoutingSpec

MOE = MoESpec(num_experts=8, top_k=1, expert_ffn_hidden_size=1024)
SHARES = RoutingSpec(kind="shares", shares=(50, 10, 10, 10, 5, 5, 5, 5))


def test_computation_is_slower_beside_an_exchange_and_only_then() -> None:
    assert run_overlapped([(10.0, None)], [(3.0, None)], slowdown=0.5) == pytest.approx(3.0 + (10.0 - 2.0))
    assert run_overlapped([(10.0, None)], [(3.0, 0)], slowdown=0.5) == pytest.approx(13.0)


def test_more_chunks_hide_more_until_only_their_ends_are_left() -> None:
    seconds = []
    for degree in (1, 2, 4, 8):
        overlap = ExpertOverlap(degree, Transfer(8.0 / degree), Transfer(0.0), 0.0)
        seconds.append((overlap.forward_seconds(100.0), overlap.backward_seconds(100.0)))
        least = 100.0 + 16.0 / degree + (16.0 - 16.0 / degree) / 6  # a fifth slower while the rest of 16 passes
        assert seconds[-1][0] == pytest.approx(least)
        assert seconds[-1][1] == pytest.approx(least)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(("top_k", "size"), [(2, 2), (8, 2), (8, 8), (8, 64)])
def test_a_token_travels_once_to_each_device_with_any_of_its_experts(top_k: int, size: int) -> None:
    """With equal shares, the chance that a device has none of a token's experts is hypergeometric."""
    experts = 64
    moe = MoESpec(num_experts=experts, top_k=top_k, expert_ffn_hidden_size=64)
    visited = size * (1 - math.comb(experts - experts // size, top_k) / math.comb(experts, top_k))
    found = busiest_device(moe, RoutingSpec(), size, 0)
    assert found.visited == pytest.approx(visited, rel=0.01)
    assert found.visiting == pytest.approx(visited / size, rel=0.1)


def test_tokens_of_shadowed_experts_stay_at_home() -> None:
    moe = MOE.model_copy(update={"top_k": 2})
    none, some, everything = (busiest_device(moe, SHARES, 4, 0, shadowed) for shadowed in (0, 1, 8))
    assert 1.0 < none.visited < 2.0
    assert some.visited < none.visited
    assert none.visiting == pytest.approx(1.0, abs=0.05)  # the first expert and its neighbour have 1.2 of each 2 pairs
    assert everything.visited == everything.visiting == 0.0
