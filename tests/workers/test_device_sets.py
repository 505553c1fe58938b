from __future__ import annotations

import pytest

from workers.device_sets import default_devices, parse_devices


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
