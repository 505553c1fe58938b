from __future__ import annotations

from typing import Any

import pynvml
import pytest

from bexp.measure import visible_gpus
from bexp.workers.devices.gpu import open_gpu


def refuse(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_a_gpu_is_found_by_its_uuid_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(visible_gpus, "_gpu_uuids", lambda: ["GPU-a", "GPU-b", "GPU-c"])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", asked.append)
    assert open_gpu("cuda:0", {"CUDA_VISIBLE_DEVICES": "2,0"}) is not None
    assert open_gpu("cuda:1", {}) is not None
    assert asked == ["GPU-c", "GPU-b"]
    assert open_gpu("cuda:5", {}) is None
    assert open_gpu("cpu", {}) is None


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_gpus, "_gpu_uuids", lambda: ["GPU-a"])
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert open_gpu("cuda:0", {}) is None
