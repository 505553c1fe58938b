from __future__ import annotations

from typing import Any

import pynvml
import pytest

from bexp.measure import nvml
from bexp.measure.device_names import parse_devices
from bexp.workers.devices import discovery as devices
from bexp.workers.devices.discovery import default_devices, parse_counts

UUIDS = ["GPU-aaaa-0", "GPU-bbbb-1", "GPU-cccc-2"]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_gpu_uuids", lambda: UUIDS)


@pytest.mark.parametrize(("visible", "keys"), [(None, UUIDS), ("2,0", [UUIDS[2], UUIDS[0]]), ("", [])])
def test_numbering_follows_cuda_visible_devices(visible: str | None, keys: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = devices.visible_devices(environment)
    assert found == ("cpu", *(f"cuda:{i}" for i in range(len(keys))))
    assert [devices.device_key(device, environment) for device in found] == ["cpu", *keys]
    assert not keys or devices.device_key("cuda", environment) == keys[0]


@pytest.mark.parametrize("device", ["cuda:3", "cuda:x", "tpu", "mps:0"])
def test_unknown_devices_are_named(device: str) -> None:
    with pytest.raises(ValueError, match=device):
        devices.device_key(device, {})


def test_a_gpu_is_opened_by_its_uuid_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    asked: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", asked.append)
    assert devices.open_gpu("cuda:0", {"CUDA_VISIBLE_DEVICES": "2,0"}) is not None
    assert devices.open_gpu("cuda:1", {}) is not None
    assert asked == [UUIDS[2], UUIDS[1]]
    assert devices.open_gpu("cuda:5", {}) is devices.open_gpu("cpu", {}) is None
    for call in ("nvmlDeviceGetHandleByUUID", "nvmlInit"):
        monkeypatch.setattr(pynvml, call, refuse)
        assert devices.open_gpu("cuda:0", {}) is None


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
