"""Explorations whose devices exchange gradients: what is measured of that, and what it decides."""

from __future__ import annotations

import pytest

from bexp.explorer.cost.composition import Composition
from tests.explorer.data_parallel import candidate, communicates_in, request, run
from tests.explorer.notes import notes_of
from tests.explorer.simulator import SimulatedDevice


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_an_exploration_measures_the_exchange_first_and_once_and_tells_its_share(sharding: str) -> None:
    req = request(sharding)
    device = SimulatedDevice(req, noise=0.001)
    found, reason, _ = run(req, device)
    assert found is not None, reason
    assert [communicates_in(plan) for plan in device.plans] == [True] + [False] * (len(device.plans) - 1)
    assert device.plans[0].num_processes == 4
    assert len(device.plans[0].components) == 1, "what several devices time is not beside what one does"
    assert found.communication_seconds is not None
    assert 0 < found.communication_seconds < found.step_seconds
    (note,) = (note for note in notes_of(found) if "between 4 devices is included in the time" in note)
    assert f"{found.communication_seconds / found.step_seconds:.1%}" in note
    assert found.whole_model is not None
    assert found.whole_model.measurement.communication_seconds is not None
    assert abs(found.whole_model.step_error) < 0.01
    table = Composition([candidate(m) for m in (1, 2, 4, 8)], req.shapes, req, communicates=True)
    truth = device.true_tokens_per_second(table)
    assert truth[table.row[found.candidate]] >= 0.99 * truth.max()


def test_too_few_devices_leave_it_out_and_say_so() -> None:
    req = request("zero2")
    device = SimulatedDevice(req)
    found, reason, _ = run(req, device, num_devices=2)
    assert found is not None, reason
    assert found.communication_seconds is None
    assert not any(communicates_in(plan) for plan in device.plans)
    assert any("communication between devices is not included in the time" in note for note in notes_of(found))
    assert not any("is included in the time" in note for note in notes_of(found))
