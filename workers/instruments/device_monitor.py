"""The device's conditions while something is timed on it: clocks, power, temperature, other processes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import psutil

from bexp.explorer.records.measurement import SLOWDOWNS, Conditions
from bexp.measure.gpu_processes import ForeignProcesses, GpuProcessMonitor
from bexp.measure.nvml import Gpu
from bexp.measure.timestamps import CoreWatch

POLL_SECONDS = 0.05
POLL_SHARE = 0.05
"""Polls take at most this share of the time: if NVML is slow, there are fewer of them."""
LEAST_HOST_SECONDS = 0.1
"""The kernel counts CPU time in hundredths of a second, too coarse for a timing shorter than this."""
CALM_POLL_SECONDS = 0.25


class DeviceMonitor:
    """A monitor of the device during the trials of a process; without a `gpu`, of the host alone.

    `cores` says whether to watch the cores of a process that is alone on the CPU.
    """

    def __init__(
        self, gpu: Gpu | None = None, foreign_processes: GpuProcessMonitor | None = None, *, cores: bool = False
    ) -> None:
        self._gpu = gpu
        self._foreign = foreign_processes
        self._cores = cores

    def begin(self, others_bytes: int | None) -> int | None:
        """Begin a job; see `GpuProcessMonitor.begin`."""
        return self._foreign.begin(others_bytes) if self._foreign is not None else None

    def watch(self) -> Watch:
        """Return a watch for one measurement."""
        return Watch(self._gpu, self._foreign, cores=self._cores)

    def wait_until_calm(self, seconds: float) -> bool:
        """Wait at most `seconds` until the device is neither throttled nor shared; returns whether it is calm."""
        ends_at = time.monotonic() + seconds
        while not self._is_calm():
            if time.monotonic() >= ends_at:
                return False
            time.sleep(CALM_POLL_SECONDS)
        return True

    def _is_calm(self) -> bool:
        if self._foreign is not None and self._foreign.find():
            return False
        return self._gpu is None or not set(SLOWDOWNS).intersection(self._gpu.clock_reasons())


@dataclass
class _Samples:
    sm_clocks: list[int] = field(default_factory=list)
    memory_clocks: list[int] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    celsius: list[int] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)


class Watch:
    """A context around the timed repeats, entered once or several times. The timer calls `poll` within it.

    There is no second thread, which would take the interpreter's lock from the host that is being timed. NVML also
    takes locks in the driver for which launches wait. The timer calls `poll` itself when it has issued its repeats and
    would only wait for the device.
    """

    def __init__(self, gpu: Gpu | None, foreign_processes: GpuProcessMonitor | None, *, cores: bool = False) -> None:
        self._gpu = gpu
        self._foreign = foreign_processes
        self._cores = CoreWatch() if cores else None
        self._samples = _Samples()
        self._foreign_processes = ForeignProcesses()
        self._next_poll = 0.0
        self._host_started = (0.0, 0.0)
        self._host = (0.0, 0.0)

    def __enter__(self) -> Self:
        if self._foreign is not None:
            self._foreign.start()
        self._host_started = _host_seconds()
        if self._cores is not None:
            self._cores.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._cores is not None:
            self._cores.stop()
        elapsed, others = (now - before for now, before in zip(_host_seconds(), self._host_started, strict=True))
        self._host = (self._host[0] + elapsed, self._host[1] + others)
        if self._foreign is not None:
            now, before = self._foreign.find(), self._foreign_processes
            shares = [processes.busy_share for processes in (before, now) if processes.busy_share is not None]
            self._foreign_processes = ForeignProcesses(
                max(before.processes, now.processes), max(before.held_bytes, now.held_bytes), max(shares, default=None)
            )

    def poll(self) -> None:
        """Read the device, unless that was just done."""
        started = time.monotonic()
        if self._gpu is None or started < self._next_poll:
            return
        gpu, samples = self._gpu, self._samples
        for values, value in (
            (samples.sm_clocks, gpu.sm_clock_mhz()),
            (samples.memory_clocks, gpu.memory_clock_mhz()),
            (samples.watts, gpu.power_watts()),
            (samples.celsius, gpu.temperature_celsius()),
        ):
            if value is not None:
                values.append(value)  # type: ignore[arg-type]  # each list has one type
        samples.reasons.update(dict.fromkeys(gpu.clock_reasons()))
        if self._foreign is not None:
            self._foreign.look()
        now = time.monotonic()
        self._next_poll = now + max(POLL_SECONDS, (now - started) / POLL_SHARE)

    def conditions(self) -> Conditions:
        """Return the conditions of everything that was watched."""
        samples, foreign = self._samples, self._foreign_processes
        elapsed, others = self._host
        return Conditions(
            sm_clock_mhz=_median(samples.sm_clocks),
            sm_clock_min_mhz=min(samples.sm_clocks, default=None),
            sm_clock_max_mhz=self._gpu.sm_clock_max_mhz() if self._gpu is not None else None,
            memory_clock_mhz=_median(samples.memory_clocks),
            power_watts=_median(samples.watts),
            temperature_celsius=max(samples.celsius, default=None),
            clock_reasons=tuple(samples.reasons),
            foreign_processes=foreign.processes,
            foreign_bytes=foreign.held_bytes,
            foreign_busy_share=foreign.busy_share,
            host_busy_share=min(1.0, max(0.0, others / elapsed)) if elapsed >= LEAST_HOST_SECONDS else None,
            core_wait_share=self._cores.wait_share if self._cores is not None else None,
        )


def _host_seconds() -> tuple[float, float]:
    """Return the CPU seconds of the whole host, and those that other processes used; works in a container, too."""
    times, own = psutil.cpu_times(), time.process_time()
    idle = times.idle + getattr(times, "iowait", 0.0)
    busy = times.user + times.system + times.nice + getattr(times, "steal", 0.0)
    return idle + busy, busy - own


def _median(values: list[int] | list[float]) -> float | None:
    return float(statistics.median(values)) if values else None
