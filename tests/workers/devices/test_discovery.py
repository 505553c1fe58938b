from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from bexp.measure import nvml
from bexp.measure.device_names import parse_devices
from bexp.workers.devices import discovery as devices
from bexp.workers.devices.discovery import default_devices, parse_counts
from bexp.workers.process.profiler import Profiler

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


def test_what_nvml_says_of_each_gpu_is_read_and_what_it_refuses_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def find(uuid: str) -> str:
        return refuse() if uuid == UUIDS[2] else uuid

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", find)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda uuid: SimpleNamespace(gpu=int(uuid[-1]) * 93))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda *_: 61)
    named = {f"cuda:{number}": uuid for number, uuid in enumerate(UUIDS)}
    assert devices.read_gpus(named) == [
        {"device": "cuda:0", "busy_share": 0.0, "temperature_celsius": 61},
        {"device": "cuda:1", "busy_share": 0.93, "temperature_celsius": 61},
        {"device": "cuda:2"},
    ]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", refuse)
    assert devices.read_gpus({"cuda:0": UUIDS[0]}) == [{"device": "cuda:0", "temperature_celsius": 61}]
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert devices.read_gpus(named) is None
    assert devices.read_gpus({}) is None


def test_a_profiler_names_the_gpus_of_its_host(tmp_path: Path) -> None:
    of_three = Profiler(["cuda:1", "cuda:0"], environment={"CUDA_VISIBLE_DEVICES": "2,0"}, lock_directory=tmp_path)
    assert of_three.gpus == {"cuda:1": UUIDS[0], "cuda:0": UUIDS[2]}
    assert Profiler("cpu", lock_directory=tmp_path).gpus == {}


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
