"""Which GPUs CUDA_VISIBLE_DEVICES leaves a process, in CUDA's order."""

from __future__ import annotations

import pynvml
import pytest

from bexp.measure.visible_gpus import visible_gpus

UUIDS = ("GPU-a1", "GPU-a2", "GPU-b1")


class Nvml:
    """Three GPUs, each of whose handles is its number; `broken` is the call that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> None:
        self.is_open = False
        self._broken = broken
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: self.call("nvmlInit", opens=True))
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: self.call("nvmlShutdown", opens=False))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", self.count)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: UUIDS[handle])

    def call(self, name: str, *, opens: bool) -> None:
        if self._broken == name:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        self.is_open = opens

    def count(self) -> int:
        assert self.is_open
        if self._broken == "nvmlDeviceGetCount":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return len(UUIDS)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-a1", "GPU-a2", "GPU-b1"]),
        ("2,0", ["GPU-b1", "GPU-a1"]),
        ("GPU-b", ["GPU-b1"]),
        ("GPU-a2, 0", ["GPU-a2", "GPU-a1"]),
        ("GPU-a", ["GPU-a1"]),
        ("MIG-7,1", ["MIG-7", "GPU-a2"]),
        ("1,3,0", ["GPU-a2"]),
        ("0,GPU-c,1", ["GPU-a1"]),
        ("0,-1,1", ["GPU-a1"]),
        ("", []),
    ],
)
def test_the_visible_gpus_are_in_the_order_of_their_names(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    nvml = Nvml(monkeypatch)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environment) == expected
    assert not nvml.is_open


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount"])
def test_where_nvml_does_not_answer_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    nvml = Nvml(monkeypatch, broken)
    assert visible_gpus({}) == []
    assert not nvml.is_open
