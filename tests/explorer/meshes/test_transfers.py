"""Transfers between devices: interpolated between what was measured."""

from __future__ import annotations

import pytest

from bexp.explorer.cost.components import ExchangeSpec, Operation
from bexp.explorer.meshes.transfers import ASSUMED_BYTES_PER_SECOND, Group, Transfers


def broadcasts(*points: tuple[int, float], kind: str = "cuda") -> Transfers:
    """Transfers of a group of two, of which so many bytes took so many seconds."""
    asked = {"operation": Operation.BROADCAST, "size": 2, "stride": 1}
    return Transfers({ExchangeSpec(**asked, num_bytes=size): (seconds, 1e-4) for size, seconds in points}, kind)


@pytest.mark.parametrize(("kind", "issued"), [("cuda", 1e-4), ("cpu", 0.0)])
def test_a_broadcast_is_interpolated_and_costs_a_host_that_is_no_device(kind: str, issued: float) -> None:
    found = broadcasts((1000, 1e-3), (3000, 2e-3), kind=kind)
    group = Group(2, 1)
    assert [found.take(Operation.BROADCAST, b, group).seconds for b in (0, 500, 2000, 6000)] == pytest.approx(
        [0.0, 1e-3, 1.5e-3, 4e-3]
    )
    assert found.take(Operation.BROADCAST, 2000, group).host_seconds == issued


def test_what_was_not_measured_has_an_assumed_rate() -> None:
    found = broadcasts((1000, 1e-3))
    group = Group(2, 1)
    for transfer in (
        found.take(Operation.SEND, 1e6, group),
        found.take(Operation.ALL_TO_ALL, 1e6, group),
        found.take(Operation.BROADCAST, 1e6, Group(4, 1)),
    ):
        assert transfer.seconds == pytest.approx(1e6 / ASSUMED_BYTES_PER_SECOND["cuda"])
        assert transfer.host_seconds == 0.0
    assert found.take(Operation.SEND, 0, group).seconds == 0.0
