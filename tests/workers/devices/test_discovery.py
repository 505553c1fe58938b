from typing import Any

import pynvml
import pytest

from bexp.measure import nvml
from bexp.workers.devices import discovery as devices

UUIDS = ["GPU-aaaa-0", "GPU-bbbb-1", "GPU-cccc-2"]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_gpu_uuids", lambda: UUIDS)


@pytest.mark.parametrize(
    ("visible", "keys"),
    [
        (None, UUIDS),
        ("2,0", ["GPU-cccc-2", "GPU-aaaa-0"]),
        ("GPU-bbbb", ["GPU-bbbb-1"]),
        ("1,7,0", ["GPU-bbbb-1"]),  # CUDA stops at the first that does not exist
        ("", []),
        ("-1", []),
        ("MIG-1234", ["MIG-1234"]),
    ],
)
def test_numbering_follows_cuda_visible_devices(visible: str | None, keys: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = devices.visible_devices(environment)
    assert found == ("cpu", *(f"cuda:{i}" for i in range(len(keys))))
    assert [devices.device_key(device, environment) for device in found[1:]] == keys


def test_cuda_alone_means_the_first() -> None:
    assert devices.device_key("cuda", {}) == UUIDS[0]
    assert devices.device_key("cpu", {}) == "cpu"


@pytest.mark.parametrize("device", ["cuda:3", "cuda:x", "tpu", "mps:0"])
def test_unknown_devices_are_named(device: str) -> None:
    with pytest.raises(ValueError, match=device):
        devices.device_key(device, {})


def refuse(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_a_gpu_is_found_by_its_uuid_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(nvml, "_gpu_uuids", lambda: ["GPU-a", "GPU-b", "GPU-c"])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", asked.append)
    assert devices.open_gpu("cuda:0", {"CUDA_VISIBLE_DEVICES": "2,0"}) is not None
    assert devices.open_gpu("cuda:1", {}) is not None
    assert asked == ["GPU-c", "GPU-b"]
    assert devices.open_gpu("cuda:5", {}) is None
    assert devices.open_gpu("cpu", {}) is None


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_gpu_uuids", lambda: ["GPU-a"])
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert devices.open_gpu("cuda:0", {}) is None
