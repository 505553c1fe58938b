"""What devices exchange in a step: which of it shows, in the formulas and in a table."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.cost.collectives import Overlap, ShardingCommunication, is_communication_timed
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.roofline import roofline_seconds
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.trial import TrialKind, count_processes
from tests.explorer.data_parallel import candidate, request
from tests.explorer.simulator import report


def visible(
    sharding: Sharding, gather: float, rest: float, *, slowdown: float = 0.25, again: float = 0.75
) -> list[float]:
    """Of a micro-step with 2 s forward and 4 s backward, a tenth of the bytes in the first unit."""
    communication = ShardingCommunication(sharding, exposed_share=0.1, again_share=again)
    parts = [np.array([value]) for value in (gather, rest, 2.0, 4.0)]
    shown = communication.visible_seconds(parts[0], parts[1], parts[2], parts[3], slowdown)
    return [float(found[0]) for found in shown]


def test_what_shows_of_traffic_by_the_level_of_sharding() -> None:
    # Hidden, but for a tenth and a quarter of the rest: 0.1 + 0.225 of 1 s; of 2 s twice that.
    assert visible(Sharding.NONE, 0.0, 2.0) == pytest.approx([0.0, 0.65])
    assert visible(Sharding.ZERO1, 1.0, 2.0) == pytest.approx([0.0, 0.325 + 0.65])
    assert visible(Sharding.ZERO2, 1.0, 2.0) == pytest.approx([0.65, 0.325])
    # Backward gathers 0.75 s again and reduces 1.25 s, of which a tenth shows: 0.125 + 0.25 * 1.875.
    assert visible(Sharding.ZERO3, 1.0, 2.0) == pytest.approx([0.325 + 0.125 + 0.46875, 0.0])


def test_traffic_that_outlasts_the_computation_takes_its_own_time() -> None:
    assert visible(Sharding.NONE, 0.0, 100.0) == pytest.approx([0.0, 96.0])
    assert visible(Sharding.ZERO2, 10.0, 100.0) == pytest.approx([96.0, 8.0])
    assert visible(Sharding.NONE, 0.0, 2.0, slowdown=0.0) == pytest.approx([0.0, 0.2])
    assert visible(Sharding.NONE, 0.0, 2.0, slowdown=1.0) == pytest.approx([0.0, 2.0])
    assert visible(Sharding.ZERO3, 0.0, 0.0) == [0.0, 0.0]


def test_the_host_shows_where_the_device_waits_for_it_and_always_where_it_computes() -> None:
    req = request("zero3")
    table = Composition([candidate(2), candidate(8)], req.shapes, req, communicates=True)
    (communication,) = table.communications
    number = len(table.components)
    device_1K, host_K = np.full((1, number), 1e-3), np.full(number, 0.8e-3)
    micro = table.micro_step_seconds(device_1K, host_K)
    slowdown = np.full(number, 0.2)
    nothing = np.zeros((2, number))

    def added(each: float, once: float, *, computes: bool) -> np.ndarray:
        host_overhead = nothing.copy()
        host_overhead[:, table.column[communication]] = each, once
        overlap = Overlap(np.full(number, 0.3), slowdown, host_overhead, computes)
        return np.asarray(table.communication_seconds(device_1K, host_K, micro, overlap)[0])

    micro_steps = np.array([64 / 4 / 2, 64 / 4 / 8])
    hidden = added(0.1e-3, 0.1e-3, computes=False)
    np.testing.assert_allclose(hidden, added(0.0, 0.0, computes=False))
    np.testing.assert_allclose(added(0.1e-3, 0.2e-3, computes=True), hidden + micro_steps * 0.1e-3 + 0.2e-3)
    issued = 0.8 * micro[0]  # the host's time of all blocks
    shown = added(0.1, 0.02, computes=False)
    np.testing.assert_allclose(shown, micro_steps * (issued + 0.1 - micro[0]) + 0.02)


def test_what_is_exchanged_before_it_is_measured() -> None:
    rep = report(num_devices=4)
    component = Component(kind=ComponentKind.COMMUNICATION, micro_batch_size=0)
    seconds = {}
    for sharding in Sharding:
        req = request(sharding.value)
        seconds[sharding] = roofline_seconds(component, req.shapes, req, rep.hardware).device
    assert seconds[Sharding.NONE] == pytest.approx(seconds[Sharding.ZERO1])
    assert seconds[Sharding.ZERO3] == pytest.approx(1.5 * seconds[Sharding.ZERO2])
    wide = request("zero2", training={"sharding": "zero2", "optimizer": {"grad_dtype": "float32"}})
    found = roofline_seconds(component, wide.shapes, wide, rep.hardware).device
    assert found == pytest.approx(1.5 * seconds[Sharding.ZERO2])


def test_only_a_worker_with_all_devices_times_the_exchange() -> None:
    assert is_communication_timed(request(), report(num_devices=4).hardware)
    assert not is_communication_timed(request(), report(num_devices=3).hardware)
    assert not is_communication_timed(request(mode="eval"), report(num_devices=4).hardware)
    assert not is_communication_timed(request(num_devices=1), report(num_devices=4).hardware)
    component = Component(kind=ComponentKind.COMMUNICATION, micro_batch_size=0)
    hardware = report(num_devices=8).hardware
    assert count_processes(TrialKind.COMPONENTS, candidate(), [component], request(), hardware) == 4


def test_an_exploration_that_began_with_all_devices_needs_them_all() -> None:
    assert request().devices.needed() == 1, "a worker with one device leaves the exchange out"
    assert [request().devices.needed(n) for n in (1, 3, 4, 8)] == [1, 1, 4, 4]
    assert request(mode="eval").devices.needed(4) == 1
