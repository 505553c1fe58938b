from __future__ import annotations

import pytest

from bexp.measure.device_names import parse_devices
from bexp.workers.devices.discovery import default_devices, parse_counts


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cpu", ("cpu",)),
        ("cuda", ("cuda:0",)),
        ("cuda:2", ("cuda:2",)),
        ("cuda:0-3", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:3-3", ("cuda:3",)),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cuda:0-1,cuda:3", ("cuda:0", "cuda:1", "cuda:3")),
    ],
)
def test_devices_are_parsed(text: str, devices: tuple[str, ...]) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize(
    "text", ["", "gpu", "cuda:", "cuda:-1", "cuda:3-1", "cpu:0", "cuda:0-", "cuda:x", "cuda:0\n", "cpu,"]
)
def test_other_devices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="device"):
        parse_devices(text)


def test_a_gpu_is_preferred() -> None:
    assert default_devices(("cpu", "cuda:0", "cuda:1")) == ("cuda:0",)
    assert default_devices(("cpu",)) == ("cpu",)


def test_a_group_is_of_all_gpus() -> None:
    assert default_devices(("cpu", "cuda:0", "cuda:1"), group=True) == ("cuda:0", "cuda:1")
    assert default_devices(("cpu",), group=True) == ("cpu",)


@pytest.mark.parametrize(
    ("counts", "number"), [((2,), 2), ((1, 4), 4), ((4, 1), 4), ((1, 2, 3, 6), 3), ((1, 8), 1), ((1,), 1)]
)
@pytest.mark.parametrize("group", [True, False])
def test_of_several_counts_the_most_that_there_are_is_taken(counts: tuple[int, ...], number: int, group: bool) -> None:
    visible = ("cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert default_devices(visible, group=group, counts=counts) == visible[1 : 1 + number]
    assert default_devices(("cpu",), group=group, counts=(*counts, 1)) == ("cpu",)
    with pytest.raises(ValueError, match="6 devices are needed, and there is cuda:0"):
        default_devices(visible, group=group, counts=(6, 8))


def test_counts_are_parsed() -> None:
    assert parse_counts("2") == (2,)
    assert parse_counts("1,2,16") == (1, 2, 16)


@pytest.mark.parametrize("text", ["", "0", "1,0", "-1", "1,", "two", "1.5", "\u0661"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number of devices"):
        parse_counts(text)
