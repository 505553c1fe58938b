"""Devices that share sequences: what a search makes of them."""

from __future__ import annotations

import pytest

from bexp.explorer.dimensions.context_parallel import LAYOUTS
from bexp.explorer.records.recommendation import Answer
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from tests.explorer.explorations import answer_of, pruned
from tests.explorer.long_sequences import MODEL, request
from tests.explorer.notes import notes_of
from tests.explorer.simulator import SimulatedDevice, report


def run(req: ExplorationRequest, device: SimulatedDevice, num_devices: int = 4) -> tuple[Answer, list[TrialTask]]:
    rep = report(memory_gib=40, experts=False, num_devices=num_devices)
    device.hardware = rep.hardware
    answer = answer_of(list(explore(req, rep, device, prune=pruned)))
    return answer, device.plans


@pytest.mark.parametrize("best", ["ring", "striped", "zigzag"])
def test_the_search_finds_the_layout_that_the_device_likes(best: str) -> None:
    req = request((2, 4), model={**MODEL, "seq_length": 65536})
    device = SimulatedDevice(req, seed=1)
    # The prior holds the ring to be slower: to be the best it must be so by more than the prior says.
    device.layout_speed = {layout: 2.0 if layout == best else 0.8 for layout in LAYOUTS}
    answer, plans = run(req, device)
    found = answer.variants[0].recommendation
    assert found is not None
    assert found.candidate.context_parallel_layout == best
    assert {plan.num_processes for plan in plans} == {4}, "a step waits for the slowest of those that train together"
    assert any("passes between devices are included" in note for note in notes_of(found))
    assert any("the exchange of gradients between 4 devices is included" in note for note in notes_of(found))


def test_a_profiler_of_a_part_of_the_devices_runs_no_more_than_share_a_sequence() -> None:
    req = request((2,), model={**MODEL, "seq_length": 65536})
    _, plans = run(req, SimulatedDevice(req), num_devices=3)
    for plan in plans:
        communicating = [c.context_parallel_size for c in plan.components if c.communicates]
        most = 2 if plan.kind is TrialKind.WHOLE_MODEL else max(communicating, default=1)
        assert plan.num_processes == most
    assert {plan.num_processes for plan in plans} == {1, 2}


def test_sharing_wins_where_memory_leaves_nothing_else_and_loses_where_it_only_costs() -> None:
    roomy = request((1, 2), attention_backends=["flash"])
    device = SimulatedDevice(roomy)
    device.layout_speed = dict.fromkeys(LAYOUTS, 0.5)
    best = run(roomy, device)[0].variants[0].recommendation
    assert best is not None
    assert best.candidate.context_parallel_size == 1
    long = request((1, 2, 4), model={**MODEL, "seq_length": 1 << 20}, recompute=["full"], attention_backends=["flash"])
    answer = run(long, SimulatedDevice(long))[0].variants[0]
    assert answer.recommendation is not None, answer.reason
    assert answer.recommendation.candidate.context_parallel_size == 4
    assert answer.recommendation.base.context_parallel_size == 2, "the first base that fits"


def test_a_worker_with_one_device_serves_what_does_not_share() -> None:
    req = request("explore")
    answer, plans = run(req, SimulatedDevice(req), num_devices=1)
    found = answer.variants[0].recommendation
    assert found is not None
    assert found.candidate.context_parallel_size == 1
    assert {plan.num_processes for plan in plans} == {1}
    assert "context-parallel sizes 2, 4 need more devices than the 1 here" in notes_of(found)
