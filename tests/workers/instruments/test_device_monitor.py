from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from bexp.explorer.records.measurement import Conditions
from bexp.workers.instruments import device_monitor
from bexp.workers.instruments.device_monitor import DeviceMonitor, Watch
from tests.workers.profiler.fakes import FakeGpu

SECONDS, SHARE = device_monitor.POLL_SECONDS, device_monitor.POLL_SHARE


@pytest.fixture(autouse=True)
def eager_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_monitor, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(device_monitor, "POLL_SHARE", float("inf"))


def set_clock(monkeypatch: pytest.MonkeyPatch, **clock: Callable[..., object]) -> None:
    """Give the monitor a `time` of its own: a service in another thread of this process keeps the true one."""
    monkeypatch.setattr(device_monitor, "time", SimpleNamespace(**clock))


def watched(gpu: FakeGpu, polls: int = 3) -> Conditions:
    watch = DeviceMonitor(gpu, gpu.foreign_processes()).watch()
    with watch:
        for _ in range(polls):
            watch.poll()
    return watch.conditions()


def test_what_nvml_does_not_tell_is_null() -> None:
    gpu = FakeGpu(clocks=[None], watts=None, celsius=None, reasons=(), pids=None, others=None)
    found = watched(gpu)
    assert found.model_copy(update={"host_busy_share": None}) == Conditions(
        sm_clock_max_mhz=1980, memory_clock_mhz=3201
    )
    assert Watch(None, None).conditions() == Conditions()


def test_waits_until_the_device_is_calm_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(reasons=("hw_thermal_slowdown",))
    monitor = DeviceMonitor(gpu, gpu.foreign_processes())
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            gpu.reasons = ("sw_power_cap",)

    set_clock(monkeypatch, monotonic=time.monotonic, sleep=sleep)
    assert monitor.wait_until_calm(60.0)
    assert len(naps) == 3
    gpu.reasons = ("hw_thermal_slowdown",)
    assert not monitor.wait_until_calm(0.0)
    assert DeviceMonitor().wait_until_calm(0.0), "of a CPU nothing is known"


@pytest.mark.parametrize(
    ("elapsed", "others", "share"),
    [(4.0, 3.0, 0.75), (0.1, 0.05, 0.5), (0.0999, 0.05, None), (2.0, -1.0, 0.0), (2.0, 3.0, 1.0)],
    ids=["a share", "the shortest", "too short", "less than nothing", "more than all"],
)
def test_the_cpu_time_of_others_is_a_share_of_the_hosts(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, others: float, share: float | None
) -> None:
    moments = iter([(0.0, 0.0), (elapsed, others)])
    monkeypatch.setattr(device_monitor, "_host_seconds", lambda: next(moments))
    with DeviceMonitor().watch() as watch:
        pass
    assert watch.conditions() == Conditions(host_busy_share=share)


def test_the_most_that_others_had_in_any_part_counts() -> None:
    gpu = FakeGpu(shares={7: 0.5, 9: 0.25}, pids=frozenset({7}))
    foreign_processes = gpu.foreign_processes()
    foreign_processes.begin(None)
    watch = DeviceMonitor(gpu, foreign_processes).watch()
    with watch:
        gpu.pids, gpu.others = frozenset({7, 9, 11}), 3 << 30
    gpu.others = 0
    gpu.shares, gpu.pids = {7: 0.5, 9: 0.125}, frozenset({7, 9})
    with watch:
        pass
    found = watch.conditions()
    assert (found.foreign_processes, found.foreign_busy_share, found.foreign_bytes) == (2, 0.25, 3 << 30)


def test_the_hosts_times_are_all_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, process_time=lambda: 3.0)
    plain = SimpleNamespace(idle=100.0, user=10.0, system=5.0, nice=1.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: plain)
    assert device_monitor._host_seconds() == (116.0, 13.0)
    linux = SimpleNamespace(**vars(plain), iowait=20.0, steal=4.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: linux)
    assert device_monitor._host_seconds() == (140.0, 17.0)


def test_a_shared_device_is_not_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    foreign_processes = gpu.foreign_processes()
    foreign_processes.begin(None)
    monitor = DeviceMonitor(gpu, foreign_processes)
    assert monitor.wait_until_calm(0.0)
    gpu.pids = frozenset({7, 8})
    assert not monitor.wait_until_calm(0.0)
    moments = iter([10.0, 10.0, 10.5, 11.0, 11.5])
    naps: list[float] = []
    set_clock(monkeypatch, monotonic=lambda: next(moments), sleep=naps.append)
    assert not monitor.wait_until_calm(1.0)
    assert naps == [device_monitor.CALM_POLL_SECONDS] * 2, "it waits for the seconds that it is given"


def test_the_next_poll_is_due_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_monitor, "POLL_SECONDS", SECONDS)
    monkeypatch.setattr(device_monitor, "POLL_SHARE", SHARE)
    gpu = FakeGpu()
    watch = Watch(gpu, None)
    for moments, polls in (([1.0, 1.001], 1), ([1.0499], 1), ([1.0511, 1.0611], 2), ([1.2610], 2), ([1.2612, 1.3], 3)):
        left = iter(moments)
        set_clock(monkeypatch, monotonic=lambda left=left: next(left))
        watch.poll()
        assert gpu.polls == polls, moments


def test_the_highest_temperature_and_the_median_power_are_kept() -> None:
    gpu = FakeGpu()
    with DeviceMonitor(gpu).watch() as watch:
        for gpu.celsius, gpu.watts in ((50, 100.0), (70, 400.0), (60, 200.0)):
            watch.poll()
    assert (watch.conditions().temperature_celsius, watch.conditions().power_watts) == (70, 200.0)
