from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from bexp.measure.nvml import CLOCK_REASONS, SLOWDOWNS, Gpu


def refuse(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_what_nvml_refuses_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in vars(pynvml) if name.startswith("nvmlDeviceGet")]:
        monkeypatch.setattr(pynvml, name, refuse)
    gpu = Gpu(None)
    assert [gpu.sm_clock_mhz(), gpu.sm_clock_max_mhz(), gpu.memory_clock_mhz()] == [None] * 3
    assert [gpu.power_watts(), gpu.temperature_celsius(), gpu.used_bytes()] == [None] * 3
    assert [gpu.processes(), gpu.busy_shares(0)] == [None] * 2
    assert gpu.clock_reasons() == ()


def test_reasons_are_named_also_by_drivers_that_call_them_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwSlowdown | 1 << 40
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", refuse)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda _: bits)
    assert Gpu(None).clock_reasons() == ("sw_power_cap", "hw_slowdown")
    assert len(set(CLOCK_REASONS.values())) == 9


def test_shares_are_means_of_the_samples_since_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        SimpleNamespace(pid=1, timeStamp=50, smUtil=100),
        SimpleNamespace(pid=1, timeStamp=150, smUtil=20),
        SimpleNamespace(pid=1, timeStamp=160, smUtil=40),
        SimpleNamespace(pid=2, timeStamp=150, smUtil=70),
        SimpleNamespace(pid=2, timeStamp=150, smUtil=4242),  # as some drivers fill what they do not know
    ]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", lambda handle, since: samples)
    shares = Gpu(None).busy_shares(100)
    assert shares is not None
    assert shares == pytest.approx({1: 0.3, 2: 0.7})


def test_a_gpu_is_opened_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", asked.append)
    assert Gpu.open("GPU-b") is not None
    assert asked == ["GPU-b"]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", refuse)
    assert Gpu.open("GPU-b") is None


def test_slowdowns_are_names_of_clock_reasons() -> None:
    assert set(SLOWDOWNS) < set(CLOCK_REASONS.values())
