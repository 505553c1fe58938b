"""Transfers between devices that are there: interpolated between what was measured."""

from __future__ import annotations

import pytest

from bexp.explorer.cost_model.components import Component, ComponentKind, ExchangeSpec, Operation
from bexp.explorer.cost_model.transfers import Fabric, Group, Link
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.spec.fabric import FabricSpec
from bexp.explorer.surrogate.measured_transfers import ASSUMED_BYTES_PER_SECOND, MeasuredTransfers


def measured(operation: Operation, num_bytes: int, seconds: float) -> ComponentMeasurement:
    asked = ExchangeSpec(operation=operation, size=2, stride=1, num_bytes=num_bytes)
    return ComponentMeasurement(
        component=Component(kind=ComponentKind.EXCHANGE, micro_batch_size=0, exchange=asked),
        device_seconds=seconds,
        host_seconds=1e-4,
        forward_device_seconds=seconds,
        standard_error_seconds=0.0,
        repeats=9,
        saved_bytes=0,
        forward_peak_bytes=0,
        backward_peak_bytes=0,
    )


@pytest.mark.parametrize(("kind", "issued"), [("cuda", 1e-4), ("cpu", 0.0)])
def test_a_broadcast_is_interpolated_and_costs_a_host_that_is_no_device(kind: str, issued: float) -> None:
    points = [measured(Operation.BROADCAST, 1000, 1e-3), measured(Operation.BROADCAST, 3000, 2e-3)]
    found = MeasuredTransfers(points, kind)
    group = Group(2, 1)
    assert [found.broadcast(b, group).seconds for b in (0, 500, 2000, 6000)] == pytest.approx([0.0, 1e-3, 1.5e-3, 4e-3])
    assert found.broadcast(2000, group).host_seconds == issued


def test_a_described_broadcast_passes_all_its_bytes() -> None:
    fabric = Fabric(
        FabricSpec.model_validate({"intra_node": {"devices": 8, "gigabytes_per_second": 100, "microseconds": 0}})
    )
    assert fabric.broadcast(1e9, Group(4, 1)).seconds == pytest.approx(0.01)
    assert fabric.broadcast(1e9, Group(1, 1)).seconds == 0.0


def test_what_was_not_measured_is_assumed_on_the_same_link() -> None:
    found = MeasuredTransfers([measured(Operation.BROADCAST, 1000, 1e-3)], "cuda")
    group = Group(2, 1)
    for transfer in (found.send(1e6, group), found.all_to_all(1e6, group), found.broadcast(1e6, Group(4, 1))):
        assert transfer.seconds == pytest.approx(1e6 / ASSUMED_BYTES_PER_SECOND["cuda"])
        assert transfer.link is Link.DEVICES
        assert transfer.host_seconds == 0.0
    assert found.send(0, group).seconds == 0.0
