"""Expert modes: what runs beside what, the rows that shadowed experts leave, and what that costs a block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost_model.activation_memory import predict_component_bytes
from bexp.explorer.cost_model.components import Component, ComponentKind
from bexp.explorer.cost_model.expert_overlap import ExpertOverlap, run_beside
from bexp.explorer.cost_model.mesh_layers import MeshDecomposer
from bexp.explorer.cost_model.shard_costs import predict_shard_bytes
from bexp.explorer.cost_model.shards import SPREAD_EXPERTS, busiest_device, expert_chunk, expert_rows
from bexp.explorer.cost_model.transfers import Fabric, Link, Transfer
from bexp.explorer.search.mesh_knowledge import MeshKnowledge
from bexp.explorer.spec.expert_modes import ExpertMode
from bexp.explorer.spec.mesh import Mesh
from bexp.explorer.spec.model import MoESpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.routing import RoutingSpec
from tests.explorer.simulator import report

MOE = MoESpec(num_experts=8, top_k=1, expert_ffn_hidden_size=1024)
SHARES = RoutingSpec(kind="shares", shares=(50, 10, 10, 10, 5, 5, 5, 5))
FABRIC: dict[str, Any] = {"intra_node": {"devices": 8, "gigabytes_per_second": 100.0, "microseconds": 0.0}}
MODEL = {
    "num_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "seq_length": 1024,
    "moe": MOE.model_dump(),
}


def plan(mode: str, **changes: Any) -> MeshKnowledge:
    parallelism = {"expert": 4, "expert_mode": mode, **changes.pop("parallelism", {})}
    values = {"model": MODEL, "num_devices": 4, "batch_size": 32, "fabric": FABRIC, "micro_batch_size": [8]}
    values |= {"routing": SHARES.model_dump(), "recompute": ["none"], "parallelism": parallelism, **changes}
    return MeshKnowledge(ExplorationRequest.model_validate(values), report())


@pytest.mark.parametrize(
    ("computed", "moved", "seconds"),
    [
        ([(4.0, 0)], [(1.0, None), (1.0, 0)], 6.0),  # plain: there, compute, back
        ([(4.0, 0), (4.0, 1)], [(1.0, None), (1.0, None), (1.0, 0), (1.0, 1)], 10.0),  # all but the ends is hidden
        ([(1.0, 0), (1.0, 1)], [(4.0, None), (4.0, None), (4.0, 0), (4.0, 1)], 16.0),  # exchanges bound it
        ([(4.0, None)], [(2.0, None)], 4.0),
        ([(1.0, None)], [(5.0, 0)], 6.0),
    ],
)
def test_two_resources_run_their_tasks_as_early_as_they_can(
    computed: list[tuple[float, int | None]], moved: list[tuple[float, int | None]], seconds: float
) -> None:
    assert run_beside(computed, moved, slowdown=0.0) == pytest.approx(seconds)


def test_computation_is_slower_beside_an_exchange_and_only_then() -> None:
    assert run_beside([(10.0, None)], [(3.0, None)], slowdown=0.5) == pytest.approx(3.0 + (10.0 - 2.0))
    assert run_beside([(10.0, None)], [(3.0, 0)], slowdown=0.5) == pytest.approx(13.0)


def test_the_first_exchange_passes_while_the_device_waits_for_the_host() -> None:
    """Between its wait and the experts, the host issues three exchanges for each chunk."""
    overlap = ExpertOverlap(1, Transfer(2.0, host_seconds=0.5), Transfer(0.0), 0.0, num_copies=0)
    assert overlap.forward_seconds(10.0) == pytest.approx(14.0), "1.5 s of the host pass beside the first exchange"
    assert overlap.forward_seconds(10.0, stalled=0.4) == pytest.approx(14.0)
    assert overlap.forward_seconds(10.0, stalled=3.0) == pytest.approx(14.0 + 3.0 + 1.5 - 2.0)
    assert overlap.backward_seconds(10.0) == pytest.approx(14.0)
    assert overlap.issued_seconds == (5 * 0.5, 3 * 0.5)
    copied = ExpertOverlap(2, Transfer(2.0, host_seconds=0.5), Transfer(1.0, host_seconds=0.25), 0.5, num_copies=4)
    assert copied.issued_seconds == (9 * 0.5 + 4 * 0.25, 6 * 0.5 + 4 * 0.25)


def test_routing_weights_travel_with_the_rows_after_the_counts() -> None:
    overlap = ExpertOverlap(1, Transfer(2.0), Transfer(0.0), 0.0, paired=Transfer(0.25))
    assert overlap.forward_seconds(10.0) == pytest.approx(10.0 + 2 * 2.25 + 0.25)
    assert overlap.backward_seconds(10.0) == pytest.approx(10.0 + 2 * 2.25)


def test_one_chunk_without_shadows_hides_nothing() -> None:
    overlap = ExpertOverlap(1, Transfer(2.0), Transfer(0.0), 0.0)
    assert overlap.forward_seconds(10.0) == overlap.backward_seconds(10.0) == pytest.approx(14.0)


def test_more_chunks_hide_more_until_only_their_ends_are_left() -> None:
    seconds = []
    for degree in (1, 2, 4, 8):
        overlap = ExpertOverlap(degree, Transfer(8.0 / degree), Transfer(0.0), 0.0)
        seconds.append((overlap.forward_seconds(100.0), overlap.backward_seconds(100.0)))
        least = 100.0 + 16.0 / degree + (16.0 - 16.0 / degree) / 6  # a fifth slower while the rest of 16 passes
        assert seconds[-1][0] == pytest.approx(least)
        assert seconds[-1][1] == pytest.approx(least)
    assert seconds == sorted(seconds, reverse=True)


def test_shadowed_weights_travel_beside_the_other_experts_both_ways() -> None:
    hidden = ExpertOverlap(1, Transfer(1.0), Transfer(3.0, Link.INTER_NODE), 0.5)
    assert hidden.forward_seconds(20.0) == hidden.backward_seconds(20.0)
    # 1 there, 20 of computation of which 3 + 1 s pass beside an exchange
    assert hidden.forward_seconds(20.0) == pytest.approx(1.0 + 20.0 + 4.0 / 6)
    bound = ExpertOverlap(1, Transfer(1.0), Transfer(60.0, Link.INTER_NODE), 0.5)
    assert bound.forward_seconds(20.0) > 61.0 + 10.0
    assert bound.link is Link.INTER_NODE
    assert hidden.link is Link.INTER_NODE
    assert ExpertOverlap(2, Transfer(1.0), Transfer(3.0, Link.INTER_NODE), 0.5).link is Link.INTRA_NODE


def test_shadowed_experts_leave_the_busiest_device_the_rest() -> None:
    """Devices of two experts each have shares of 60, 20, 10 and 10%, and without the first expert 10, 20, 10 and 10."""
    plain = busiest_device(MOE, SHARES, 4, 0)
    assert plain.share == pytest.approx(0.60, abs=0.02)
    assert plain.home_share == 0.0
    one = busiest_device(MOE, SHARES, 4, 0, 1)
    assert one.share == pytest.approx(0.20, abs=0.02)
    assert one.home_share == pytest.approx(0.50, abs=0.02)
    assert one.routing.shares is not None
    # its own two experts get the pairs of all four devices, and the copy those of one
    assert np.array(one.routing.shares) / sum(one.routing.shares) == pytest.approx([0.31, 0.31, 0.38], abs=0.02)
    everything = busiest_device(MOE, SHARES, 4, 0, 8)
    assert (everything.share, everything.home_share) == (0.0, 1.0)


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


def spread(**changes: Any) -> Component:
    values = {"kind": ComponentKind.MOE_FFN, "part": SPREAD_EXPERTS, "expert_parallel_size": 4, **changes}
    return Component.model_validate(values)


@pytest.mark.parametrize(("shadowed", "rows"), [(0, 0.6 * 4), (1, 0.2 * 4 + 0.5), (8, 1.0)])
def test_formulas_take_the_rows_of_the_slowest_device(shadowed: int, rows: float) -> None:
    space = plan("plain")
    component = spread(micro_batch_size=8, shadowed_experts=shadowed)
    model, request = space.request.shapes, space.request
    found = expert_rows(component, model, request)
    assert found.computed == pytest.approx(8 * 1024 * rows, rel=0.05)
    assert found.moved_out + found.home == pytest.approx(8 * 1024, abs=1)  # with one expert a token, each pair travels
    shard, routed = expert_chunk(component, model, request)
    assert shard.moe is not None
    assert shard.moe.num_experts == 2 + shadowed
    assert routed.routing.shares is not None
    assert len(routed.routing.shares) == 2 + shadowed
    assert 8 * shard.seq_length == pytest.approx(found.computed, abs=8)
    chunk, _ = expert_chunk(component.model_copy(update={"overlap_degree": 4}), model, request)
    assert 8 * chunk.seq_length == pytest.approx(found.computed / 4, abs=8)


def test_the_keys_of_components_tell_the_modes_apart() -> None:
    component = spread(micro_batch_size=1)
    assert component.key == "moe_ffn(spread_experts,m=1,ep=4)"
    assert component.model_copy(update={"overlap_degree": 2}).key == "moe_ffn(spread_experts,m=1,ep=4,chunks=2)"
    assert component.model_copy(update={"shadowed_experts": 3}).key == "moe_ffn(spread_experts,m=1,ep=4,shadowed=3)"
    assert not {"overlap_degree", "shadowed_experts"} & component.model_dump().keys()


def test_each_mode_hides_or_spares_what_it_is_for() -> None:
    steps = {}
    for mode in ExpertMode:
        space = plan(mode.value)
        one = max(space.candidates, key=lambda each: space.step(each).tokens_per_second)
        assert one.mesh.expert_mode is mode
        steps[mode] = space.step(one)
    plain, overlapped, shadowed = steps.values()
    assert overlapped.exchange_share < 0.75 * plain.exchange_share
    assert plain.tokens_per_second < overlapped.tokens_per_second < shadowed.tokens_per_second
    for step in steps.values():
        assert sum(step.makeup.values()) == pytest.approx(1.0)
        assert step.compute_share + step.exchange_share == pytest.approx(1.0)


def test_routing_decides_how_many_experts_are_shadowed() -> None:
    skewed = {one.mesh.shadowed_experts for one in plan("shadowed").candidates}
    even = {one.mesh.shadowed_experts for one in plan("shadowed", routing={"kind": "uniform"}).candidates}
    assert max(skewed) in {1, 2, 3, 4}
    one_node = {"intra_node": {**FABRIC["intra_node"], "gigabytes_per_second": 1.0}}
    slow = {
        one.mesh.shadowed_experts for one in plan("shadowed", routing={"kind": "uniform"}, fabric=one_node).candidates
    }
    assert max(even) >= 1
    assert slow != skewed
    named = plan("shadowed", parallelism={"shadowed_experts": [5]})
    assert {one.mesh.shadowed_experts for one in named.candidates} == {5}


def test_copies_are_kept_until_backward_which_has_their_gradients_too() -> None:
    space = plan("shadowed", parallelism={"shadowed_experts": 4})
    model, request = space.request.shapes, space.request
    mesh = Mesh(expert=4, data=4, shadowed_experts=4)
    component = Component(kind=ComponentKind.MOE_FFN, micro_batch_size=8, backend="grouped_mm")
    assert request.fabric is not None
    block = MeshDecomposer(model, request, Fabric(request.fabric)).expert_block(mesh, component)
    assert block.overlap is not None
    copied = 4 * 3 * 1024 * 1024 * 2
    assert block.overlap.num_copies == 2 * 4
    assert block.overlap.copied.seconds == pytest.approx(copied / 8 / 100e9)
    rows = expert_rows(block.component, model, request)
    assert block.overlap.local_bytes == 2 * (rows.moved_in + rows.moved_out) * 1024 * 2
    found = predict_shard_bytes(block.component, model, request)
    chunk = predict_component_bytes(block.component, *expert_chunk(block.component, model, request))
    moved = (2 * rows.moved_out + rows.moved_in) * 1024 * 2
    assert found.saved == chunk.saved + copied
    assert found.forward_peak == chunk.forward_peak + copied + moved
    assert found.backward_peak == chunk.backward_peak + 2 * copied + moved


def test_every_chunk_is_kept_until_backward() -> None:
    space = plan("plain")
    one, four = (
        predict_shard_bytes(
            spread(micro_batch_size=8, backend="grouped_mm", overlap_degree=n), space.request.shapes, space.request
        )
        for n in (1, 4)
    )
    assert four.saved == pytest.approx(one.saved, rel=0.01)
    assert four.backward_peak < one.backward_peak


def test_a_mesh_says_its_mode() -> None:
    mesh = Mesh(expert=4, data=4)
    assert mesh.expert_mode is ExpertMode.PLAIN
    chunks = mesh.model_copy(update={"overlap_degree": 2})
    assert "expert=4 (overlapped in 2 chunks) data=4" in chunks.describe()
    shadowed = mesh.model_copy(update={"shadowed_experts": 3})
    assert "expert=4 (3 shadowed) data=4" in shadowed.describe()
    assert shadowed.in_plain_mode == chunks.in_plain_mode == mesh
    assert len({each.block_key for each in (mesh, chunks, shadowed)}) == 3
