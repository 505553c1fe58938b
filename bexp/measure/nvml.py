"""GPUs as NVML sees them. A query returns None if the driver, a right or a feature is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import pynvml

Answer = TypeVar("Answer")

CLOCK_REASONS: dict[int, str] = {
    pynvml.nvmlClocksEventReasonGpuIdle: "gpu_idle",
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "applications_clocks_setting",
    pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal_slowdown",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display_clock_setting",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, which older drivers call throttle reasons."""


class Gpu:
    """Read-only queries of one GPU. Each takes tens of microseconds to milliseconds; none makes a context."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def open(cls, uuid: str) -> Self | None:
        """The GPU of a UUID as NVML writes it (`GPU-...` or `MIG-...`); None if NVML does not know it."""
        try:
            pynvml.nvmlInit()
            return cls(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except pynvml.NVMLError:
            return None

    def sm_clock_mhz(self) -> int | None:
        """The clock of the streaming multiprocessors, now."""
        return _ask(lambda: int(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)))

    def sm_clock_max_mhz(self) -> int | None:
        """The highest clock that the multiprocessors have."""
        return _ask(lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM)))

    def memory_clock_mhz(self) -> int | None:
        """The clock of the memory, now."""
        return _ask(lambda: int(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_MEM)))

    def power_watts(self) -> float | None:
        """The power that the board draws, in watts."""
        return _ask(lambda: int(pynvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3)

    def temperature_celsius(self) -> int | None:
        """The temperature of the chip."""
        return _ask(lambda: int(pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU)))

    def busy_share(self) -> float | None:
        """The share (0..1) of the driver's last sample, of a second at most, in which a kernel of any process ran."""
        return _ask(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100)

    def mean_busy_share(self, since: float) -> float | None:
        """The share (0..1) of the time since then, a `time.time()`, in which a kernel of any process ran.

        The driver samples it five times a second. None if it has no whole sample yet, as it has none of MIG's parts.
        """

        def query() -> float | None:
            kind, begins_at = pynvml.NVML_GPU_UTILIZATION_SAMPLES, round(1e6 * since)
            _, samples = pynvml.nvmlDeviceGetSamples(self._handle, kind, begins_at)
            whole = [int(s.sampleValue.uiVal) for s in samples if int(s.timeStamp) >= begins_at][1:]
            return sum(whole) / len(whole) / 100 if whole else None

        return _ask(query)

    def clock_reasons(self) -> tuple[str, ...]:
        """The reasons for the present clocks, in the order of NVML's bits."""
        bits = _ask(lambda: int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)))
        if bits is None:
            bits = _ask(lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)))
        return tuple(name for bit, name in CLOCK_REASONS.items() if (bits or 0) & bit)

    def used_bytes(self) -> int | None:
        """Bytes of memory in use by all processes."""
        return _ask(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used))

    def processes(self) -> frozenset[int] | None:
        """Ids of the processes with a context, in the process namespace that the driver shows.

        Within a container these may be all processes, the container's own, or none.
        """
        return _ask(lambda: frozenset(int(p.pid) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)))

    def busy_shares(self, since_microseconds: int) -> dict[int, float] | None:
        """Return each process's share (0..1) of the device's time: the mean of the driver's samples since then."""

        def query() -> dict[int, float]:
            shares: dict[int, list[float]] = {}
            for sample in pynvml.nvmlDeviceGetProcessUtilization(self._handle, since_microseconds):
                if int(sample.timeStamp) >= since_microseconds and int(sample.smUtil) <= 100:
                    shares.setdefault(int(sample.pid), []).append(int(sample.smUtil) / 100)
            return {pid: sum(values) / len(values) for pid, values in shares.items()}

        return _ask(query)


def _ask(query: Callable[[], Answer]) -> Answer | None:
    try:
        return query()
    except pynvml.NVMLError:
        return None


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the visible GPUs, in the order of CUDA's numbers."""
    uuids = _gpu_uuids()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return uuids
    chosen: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal() and int(name) < len(uuids):
            chosen.append(uuids[int(name)])
        elif name.startswith("MIG-"):
            chosen.append(name)
        elif name and any(uuid.startswith(name) for uuid in uuids):
            chosen.append(next(uuid for uuid in uuids if uuid.startswith(name)))
        else:
            break  # as CUDA does: the first invalid entry ends the list
    return chosen


def _gpu_uuids() -> list[str]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [
            pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
