from __future__ import annotations

import time
from dataclasses import replace

import pytest

from bexp.measure import device_monitor
from bexp.measure.device_monitor import DeviceConditions, DeviceMonitor, Watch
from tests.workers.profiler.fakes import FakeGpu


@pytest.fixture(autouse=True)
def eager_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_monitor, "GLANCE_SECONDS", 0.0)
    monkeypatch.setattr(device_monitor, "GLANCE_SHARE", float("inf"))


def watched(gpu: FakeGpu, polls: int = 3) -> DeviceConditions:
    watch = DeviceMonitor(gpu, gpu.foreign_processes()).watch()
    with watch:
        for _ in range(polls):
            watch.poll()
    return watch.conditions()


def test_conditions_are_those_of_all_glances() -> None:
    found = watched(FakeGpu(clocks=[1980, 1500, 1400]))
    assert found.sm_clock_mhz == 1500
    assert found.sm_clock_min_mhz == 1400
    assert found.sm_clock_max_mhz == 1980
    assert found.memory_clock_mhz == 3201
    assert found.power_watts == 650.4
    assert found.temperature_celsius == 61
    assert found.clock_reasons == ("sw_power_cap",)


def test_a_slowdown_in_one_glance_of_many_taints() -> None:
    gpu = FakeGpu()
    watch = DeviceMonitor(gpu, gpu.foreign_processes()).watch()
    with watch:
        watch.poll()
        gpu.reasons = ("sw_power_cap", "hw_slowdown")
        watch.poll()
        gpu.reasons = ("gpu_idle",)
        watch.poll()
    assert watch.conditions().clock_reasons == ("sw_power_cap", "hw_slowdown", "gpu_idle")


def test_a_tenant_of_one_part_taints_the_whole() -> None:
    gpu = FakeGpu()
    foreign_processes = gpu.foreign_processes()
    watch = DeviceMonitor(gpu, foreign_processes).watch()
    with watch:
        watch.poll()
        gpu.others = 3 << 30
    gpu.others = 0
    with watch:
        watch.poll()
    assert watch.conditions().foreign_bytes == 3 << 30


def test_what_nvml_does_not_tell_is_null_and_taints_nothing() -> None:
    gpu = FakeGpu(clocks=[None], watts=None, celsius=None, reasons=(), pids=None, others=None)
    found = watched(gpu)
    assert replace(found, host_busy_share=None) == DeviceConditions(sm_clock_max_mhz=1980, memory_clock_mhz=3201)
    assert Watch(None, None).conditions() == DeviceConditions()


def test_glances_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_monitor, "GLANCE_SECONDS", 100.0)
    gpu = FakeGpu()
    watched(gpu, polls=1000)
    assert gpu.polls == 1


def test_a_slow_driver_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_monitor, "GLANCE_SHARE", 0.05)

    class SlowGpu(FakeGpu):
        def power_watts(self) -> float | None:
            time.sleep(0.01)
            return super().power_watts()

    gpu = SlowGpu()
    watch = DeviceMonitor(gpu, gpu.foreign_processes()).watch()
    started = time.monotonic()
    with watch:
        while time.monotonic() < started + 0.1:
            watch.poll()
    assert gpu.polls == 1


def test_the_cpu_time_of_others_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([(100.0, 40.0), (104.0, 43.0)])
    monkeypatch.setattr(device_monitor, "_host_seconds", lambda: next(moments))
    with DeviceMonitor().watch() as watch:
        pass
    assert watch.conditions() == DeviceConditions(host_busy_share=0.75)


def test_our_own_cpu_time_is_not_that_of_others() -> None:
    (all_before, others_before), own = device_monitor._host_seconds(), time.process_time()
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    all_after, others_after = device_monitor._host_seconds()
    assert all_after - all_before >= 0.25
    assert others_after - others_before <= all_after - all_before - (time.process_time() - own) + 0.05


def test_waits_until_the_device_is_calm_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(reasons=("hw_thermal_slowdown",))
    monitor = DeviceMonitor(gpu, gpu.foreign_processes())
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            gpu.reasons = ("sw_power_cap",)

    monkeypatch.setattr(time, "sleep", sleep)
    assert monitor.wait_until_calm(60.0)
    assert len(naps) == 3
    gpu.reasons = ("hw_thermal_slowdown",)
    assert not monitor.wait_until_calm(0.0)
    assert DeviceMonitor().wait_until_calm(0.0), "of a CPU nothing is known"
