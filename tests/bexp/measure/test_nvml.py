from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from bexp.explorer.records.measurement import SLOWDOWNS
from bexp.measure.nvml import CLOCK_REASONS, Gpu, visible_gpus


def refuse(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_what_nvml_refuses_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in vars(pynvml) if name.startswith("nvmlDeviceGet")]:
        monkeypatch.setattr(pynvml, name, refuse)
    gpu = Gpu(None)
    assert [gpu.sm_clock_mhz(), gpu.sm_clock_max_mhz(), gpu.memory_clock_mhz()] == [None] * 3
    assert [gpu.power_watts(), gpu.temperature_celsius(), gpu.used_bytes(), gpu.busy_share()] == [None] * 4
    assert [gpu.processes(), gpu.busy_shares(0)] == [None] * 2
    assert gpu.clock_reasons() == ()


def test_reasons_are_named_also_by_drivers_that_call_them_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwSlowdown | 1 << 40
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", refuse)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda _: bits)
    assert Gpu(None).clock_reasons() == ("sw_power_cap", "hw_slowdown")
    assert len(set(CLOCK_REASONS.values())) == 9
    assert set(SLOWDOWNS) == {name for name in CLOCK_REASONS.values() if name.endswith("slowdown")}
    assert len(SLOWDOWNS) == 4


def test_shares_are_means_of_the_samples_from_a_moment_on(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [(1, 99, 100), (1, 100, 20), (1, 160, 40), (2, 150, 70), (3, 150, 100)]
    samples += [(2, 150, 101), (3, 150, 4242)]  # as some drivers fill what they do not know
    asked: list[tuple[Any, int]] = []

    def query(handle: Any, since: int) -> Any:
        asked.append((handle, since))
        return [SimpleNamespace(pid=pid, timeStamp=moment, smUtil=share) for pid, moment, share in samples]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", query)
    assert Gpu("handle").busy_shares(100) == pytest.approx({1: 0.3, 2: 0.7, 3: 1.0})
    assert asked == [("handle", 100)]


def test_each_query_asks_its_own_gpu_in_its_own_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {pynvml.NVML_CLOCK_SM: 1410, pynvml.NVML_CLOCK_MEM: 2619}
    sensors = {pynvml.NVML_TEMPERATURE_GPU: 61}

    def of_gpu(found: Any) -> Any:
        def query(handle: Any, *arguments: Any) -> Any:
            assert handle == "handle"
            return found(*arguments) if callable(found) else found

        return query

    for name, found in {
        "nvmlDeviceGetClockInfo": clocks.__getitem__,
        "nvmlDeviceGetMaxClockInfo": {pynvml.NVML_CLOCK_SM: 1980}.__getitem__,
        "nvmlDeviceGetPowerUsage": 650_400,
        "nvmlDeviceGetTemperature": sensors.__getitem__,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=7, memory=90),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 << 30, free=1, total=2),
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=3), SimpleNamespace(pid=4)],
        "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwPowerCap,
    }.items():
        monkeypatch.setattr(pynvml, name, of_gpu(found))
    gpu = Gpu("handle")
    assert (gpu.sm_clock_mhz(), gpu.sm_clock_max_mhz(), gpu.memory_clock_mhz()) == (1410, 1980, 2619)
    assert gpu.power_watts() == 650.4
    assert (gpu.temperature_celsius(), gpu.busy_share()) == (61, 0.07)
    assert gpu.used_bytes() == 5 << 30
    assert gpu.processes() == frozenset({3, 4})
    assert gpu.clock_reasons() == ("sw_power_cap",)


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
