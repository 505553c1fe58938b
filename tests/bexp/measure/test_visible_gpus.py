"""Which GPUs a process would see, by what NVML and CUDA_VISIBLE_DEVICES say."""

from __future__ import annotations

import pynvml
import pytest

from bexp.measure.nvml import visible_gpus

UUIDS = ("GPU-aa11", "GPU-ab22", "GPU-cc33")


class Driver:
    """NVML of a host with three GPUs, which has to be initialised first and shut down afterwards."""

    def __init__(self, *, fails: str | None = None) -> None:
        self.calls: list[str] = []
        self._fails = fails

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Driver:
        for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount"):
            monkeypatch.setattr(pynvml, name, lambda name=name: self._call(name))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: self._call("handle") and i)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: UUIDS[handle])
        return self

    def _call(self, name: str) -> int:
        self.calls.append(name)
        if name == self._fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return len(UUIDS)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, list(UUIDS)),
        ("", []),
        ("2,0", [UUIDS[2], UUIDS[0]]),
        (" 1 , 0", [UUIDS[1], UUIDS[0]]),
        ("0,3,1", [UUIDS[0]]),  # the first invalid entry ends the list
        ("-1,0", []),
        ("GPU-ab22,GPU-aa", [UUIDS[1], UUIDS[0]]),
        ("GPU-a", [UUIDS[0]]),
        ("GPU-x,0", []),
        ("MIG-77,1", ["MIG-77", UUIDS[1]]),
        ("1,,0", [UUIDS[1]]),
    ],
)
def test_the_environment_chooses_among_the_gpus_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: list[str]
) -> None:
    driver = Driver().install(monkeypatch)
    environment = {"HOME": "/"} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environment) == found
    assert driver.calls[0] == "nvmlInit"
    assert driver.calls[-1] == "nvmlShutdown"


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails="nvmlInit").install(monkeypatch)
    assert visible_gpus({}) == []
    assert driver.calls == ["nvmlInit"]
    lost = Driver(fails="handle").install(monkeypatch)
    assert visible_gpus({}) == []
    assert lost.calls[-1] == "nvmlShutdown"
