from __future__ import annotations

from bexp.explorer.records import measurement
from bexp.measure import nvml
from bexp.measure.device_monitor import DeviceMonitor
from bexp.workers.profiler.conditions import watched_conditions
from tests.workers.profiler.fakes import FakeGpu


def test_conditions_are_stored_as_they_were_watched() -> None:
    gpu = FakeGpu(reasons=("sw_power_cap", "hw_slowdown"))
    watch = DeviceMonitor(gpu, gpu.foreign_processes()).watch()
    with watch:
        watch.poll()
    found = watched_conditions(watch)
    assert found.sm_clock_mhz == 1980
    assert found.clock_reasons == ("sw_power_cap", "hw_slowdown")
    assert found.contamination == "the device is throttled: hw_slowdown"


def test_the_library_and_the_records_agree_on_what_a_slowdown_is() -> None:
    assert nvml.SLOWDOWNS == measurement.SLOWDOWNS
