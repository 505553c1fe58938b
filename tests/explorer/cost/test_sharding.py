"""Sharding as a choice: what a request admits, what a table makes of it, and what an exploration answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost.collectives import Overlap
from bexp.explorer.cost.composition import Composition
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import base_candidates
from tests.explorer.data_parallel import communicates_in, request, run
from tests.explorer.explorations import answer_of
from tests.explorer.search.least import smallest_requirement
from tests.explorer.simulator import SimulatedDevice, report


def choosing(levels: Any = "explore", **changes: Any) -> ExplorationRequest:
    return request(training={"sharding": levels}, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"training": {"sharding": ["none", "zero3"]}, "num_devices": 1}, "'zero3' needs num_devices > 1"),
        ({"training": {"sharding": "explore"}, "sharding_levels": ["none"]}, "given twice"),
        ({"training": {"sharding": "zero1"}, "sharding_levels": ["none"]}, "give one of them"),
        ({"training": {"sharding": []}}, "training.sharding"),
        ({"sharding_levels": []}, "at least 1 item"),
        ({"training": {"sharding": ["zero4"]}}, "zero4"),
        (
            {
                "training": {"sharding": "explore"},
                "context_parallel": {"sizes": "explore"},
                "micro_batch_size": list(range(1, 65)),
                "bta": {},
                "recompute": None,
            },
            "4 levels of sharding",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        request(**changes)


def test_traffic_slows_each_level_down_as_it_was_measured() -> None:
    req = choosing(["none", "zero3"])
    candidates = [
        Candidate(micro_batch_size=2, attention_backend="flash", num_query_groups=8, sharding=level)
        for level in (Sharding.NONE, Sharding.ZERO3)
    ]
    table = Composition(candidates, req.shapes, req, communicates=True)
    device_1K, shares = np.full((1, len(table.components)), 1e-3), np.full(len(table.components), 0.3)
    micro, nothing = np.full((1, 2), 1.0), np.zeros((2, len(shares)))
    added = []
    for slowed in table.communications:
        slowdown = np.zeros(len(shares))
        slowdown[table.column[slowed]] = 0.9
        added.append(table.communication_seconds(device_1K, nothing[0], micro, Overlap(shares, slowdown, nothing))[0])
    assert added[0][0] > added[1][0]
    assert added[0][1] < added[1][1]


def test_a_choice_needs_all_devices_that_exchange() -> None:
    assert [choosing().devices.needed(n) for n in (None, 1, 4, 8)] == [4, 4, 4, 4]
    assert choosing(["zero2"]).devices.needed() == request("zero2").devices.needed() == 1
    assert choosing(mode="eval").devices.needed() == 1
    assert choosing(num_devices=1, batch_size=8).devices.needed() == 1


def test_the_base_is_the_lowest_level_that_fits() -> None:
    req = choosing(["zero3", "zero1"])
    bases = base_candidates(req, report(experts=False, num_devices=4), req.shapes)
    assert bases[0].sharding is Sharding.ZERO1
    assert bases[-1].sharding is Sharding.ZERO3


def test_a_resumed_exploration_goes_the_same_way() -> None:
    req = choosing()
    first = SimulatedDevice(req, noise=0.0)
    found, _, trials = run(req, first)
    for kept in (2, 5):
        again = SimulatedDevice(req, noise=0.0)
        resumed, _, _ = run(req, again, history=tuple(trials[:kept]))
        assert resumed is not None and found is not None
        assert resumed.candidate == found.candidate
        assert sum(communicates_in(plan) for plan in again.plans) == max(0, 4 - kept)


def test_when_nothing_fits_the_next_level_or_more_devices_help() -> None:
    rep = report(experts=False, num_devices=4)
    high = smallest_requirement(choosing(["zero1"]), rep, choosing().shapes)
    low = smallest_requirement(choosing(["zero2"]), rep, choosing().shapes)
    req = choosing(["none", "zero1"], memory_limit_gib=(high + low) / 2 / 2**30)
    answer = answer_of(list(explore(req, rep, SimulatedDevice(req))))
    assert answer.recommendation is None
    found = {relaxation.change: relaxation for relaxation in answer.variants[0].remedies}
    assert {"sharding zero2", "sharding zero3", "num_devices 8"} <= set(found)
    assert found["num_devices 8"].settings == {"num_devices": 8}, "the batch of a step is kept"
    for change in ("sharding zero2", "num_devices 8"):
        changed = ExplorationRequest.model_validate({**req.model_dump(mode="json"), **found[change].settings})
        assert changed.space.highest_sharding is (Sharding.ZERO2 if change == "sharding zero2" else Sharding.ZERO1)
        predicted = smallest_requirement(changed, rep, req.shapes)  # too low by what the measured blocks show
        assert predicted < found[change].required_bytes < 1.05 * predicted
