"""Sharding as a choice: what a request admits, what a table makes of it, and what an exploration answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bexp.explorer.cost_model.collectives import Overlap
from bexp.explorer.cost_model.components import ComponentKind
from bexp.explorer.cost_model.composition import Composition
from bexp.explorer.cost_model.required_memory import predict_memory
from bexp.explorer.formats.request import parse_request
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import base_candidates, enumerate_candidates
from bexp.explorer.search.relaxations import smallest_requirement
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.training import Sharding
from tests.explorer.data_parallel import MODEL, communicates_in, request, run
from tests.explorer.simulator import SimulatedDevice, report

LEVELS = tuple(Sharding)


def choosing(levels: Any = "explore", **changes: Any) -> ExplorationRequest:
    return request(training={"sharding": levels}, **changes)


def test_a_list_in_training_is_a_choice() -> None:
    assert choosing().space.sharding_choices == LEVELS
    assert choosing() == request(training={}, sharding_levels="explore")
    assert choosing(["zero3", "none"]).space.sharding_choices == (Sharding.NONE, Sharding.ZERO3)
    assert request("zero2").space.sharding_choices == (None,)
    assert choosing(num_devices=1, batch_size=8).space.sharding_choices == (Sharding.NONE,)
    assert choosing(mode="eval").space.sharding_choices == (None,)
    assert parse_request(
        {"model": MODEL, "num_devices": 2, "training": {"sharding": ["zero1"]}}
    ).space.sharding_choices == (Sharding.ZERO1,)
    again = ExplorationRequest.model_validate(choosing(["zero1", "zero3"]).model_dump(mode="json"))
    assert again.space.highest_sharding is Sharding.ZERO3


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


def test_a_table_of_all_levels_is_the_tables_of_each() -> None:
    req = choosing()
    rep = report(experts=False, num_devices=4)
    space = enumerate_candidates(req, rep, req.shapes)
    assert {c.sharding for c in space.candidates} == set(LEVELS)
    everything = Composition(space.candidates, req.shapes, req, communicates=True)
    kinds = [c.kind for c in everything.components]
    assert kinds.count(ComponentKind.COMMUNICATION) == 4
    assert kinds.count(ComponentKind.OPTIMIZER) == 2, "a share of the state is the same share with every ZeRO level"
    found, needs = device_of(req).true_tokens_per_second(everything), predict_memory(everything, rep.hardware)
    assert len(set(needs[: len(LEVELS)])) == len(LEVELS)
    for level in LEVELS:
        fixed = request(level.value)
        rows = [i for i, c in enumerate(space.candidates) if c.sharding is level]
        plain = [space.candidates[i].model_copy(update={"sharding": None}) for i in rows]
        table = Composition(plain, fixed.shapes, fixed, communicates=True)
        np.testing.assert_allclose(found[rows], device_of(fixed).true_tokens_per_second(table))
        np.testing.assert_allclose(needs[rows], predict_memory(table, rep.hardware))
        assert everything.static_parts(rows[0]) == table.static_parts(0)


def device_of(req: ExplorationRequest) -> SimulatedDevice:
    device = SimulatedDevice(req, noise=0.0)
    device.hardware = report(experts=False, num_devices=4).hardware
    return device


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


@pytest.mark.parametrize("factor", [0.05, 1.3, 30.0])
def test_an_exploration_chooses_the_level(factor: float) -> None:
    req = choosing(verify=True)
    device = SimulatedDevice(req, noise=0.001)
    device.traffic_factor = factor
    found, reason, _ = run(req, device)
    assert found is not None, reason
    first = device.plans[:4]
    assert [communicates_in(plan) for plan in device.plans] == [True] * 4 + [False] * (len(device.plans) - 4)
    assert [plan.candidate.sharding for plan in first] == list(LEVELS)
    assert all(plan.components[0].sharding is plan.candidate.sharding for plan in first)
    space = enumerate_candidates(req, report(experts=False, num_devices=4), req.shapes)
    table = Composition(space.candidates, req.shapes, req, communicates=True)
    truth = device.true_tokens_per_second(table)
    assert truth[table.row[found.candidate]] >= 0.99 * truth.max()
    assert found.base.sharding is Sharding.NONE
    assert found.whole_model is not None
    assert abs(found.whole_model.step_error) < 0.01
    assert f"sharding={found.candidate.sharding}" in found.candidate.describe()


def test_memory_decides_what_may_be_chosen() -> None:
    free = choosing()
    rep = report(experts=False, num_devices=4)
    space = enumerate_candidates(free, rep, free.shapes)
    needs = predict_memory(Composition(space.candidates, free.shapes, free, communicates=True), rep.hardware)
    least = {
        level: min(n for n, c in zip(needs, space.candidates, strict=True) if c.sharding is level) for level in LEVELS
    }
    assert least[Sharding.ZERO3] < min(n for level, n in least.items() if level is not Sharding.ZERO3)
    between = (least[Sharding.ZERO3] + min(least[Sharding.ZERO1], least[Sharding.ZERO2])) / 2
    tight = choosing(memory_limit_gib=between / 2**30)
    device = SimulatedDevice(tight, noise=0.0, activations=1.0)
    found, reason, _ = run(tight, device)
    assert found is not None, reason
    assert found.candidate.sharding is Sharding.ZERO3
    assert sum(communicates_in(plan) for plan in device.plans) <= 3, "what cannot fit is not exchanged"
    assert any("memory assumes zero3 over 4 devices" in note for note in found.notes)


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


def test_a_level_that_cannot_be_exchanged_leaves_the_others() -> None:
    req = choosing()

    class Broken(SimulatedDevice):
        def __call__(self, task: TrialTask) -> Measurement:
            failed = task.components[0] if task.components else None
            if failed is None or not communicates_in(task) or failed.sharding in {Sharding.ZERO2, Sharding.ZERO3}:
                return super().__call__(task)
            return Measurement(
                candidate=task.candidate, outcome=Outcome.CRASHED, reason="no link", failed_component=failed
            )

    found, reason, trials = run(req, Broken(req, noise=0.0))
    assert found is not None, reason
    assert found.candidate.sharding in {Sharding.ZERO2, Sharding.ZERO3}
    assert sum(trial.measurement.reason == "no link" for trial in trials) == 2


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
    answer = list(explore(req, rep, SimulatedDevice(req)))[-1].answer
    assert answer is not None
    assert answer.recommendation is None
    found = {relaxation.change: relaxation for relaxation in answer.variants[0].remedies}
    assert {"sharding zero2", "sharding zero3", "num_devices 8"} <= set(found)
    assert found["num_devices 8"].settings == {"num_devices": 8, "batch_size": 128}
    for change in ("sharding zero2", "num_devices 8"):
        changed = ExplorationRequest.model_validate({**req.model_dump(mode="json"), **found[change].settings})
        assert changed.space.highest_sharding is (Sharding.ZERO2 if change == "sharding zero2" else Sharding.ZERO1)
        predicted = smallest_requirement(changed, rep, req.shapes)  # too low by what the measured blocks show
        assert predicted < found[change].required_bytes < 1.05 * predicted
