from typing import Any

import pynvml
import pytest

from bexp.measure import visible_gpus
from bexp.workers.devices import discovery as devices

UUIDS = ["GPU-aaaa-0", "GPU-bbbb-1", "GPU-cccc-2"]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_gpus, "_gpu_uuids", lambda: UUIDS)


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
