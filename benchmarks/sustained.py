"""The matmul rate that a card sustains at its power limit, which a short measurement does not show."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pynvml
import torch

SIZE = 8192
SECONDS = 1.5
_AT_ONCE = 20


def sustained_matmul(device: torch.device) -> dict[str, Any]:
    """Rate of bfloat16 products of SIZE^3 random numbers in the last half of SECONDS without a rest.

    With the multiprocessors' clock (MHz) and the power (W) meanwhile, and the card's limit; None where NVML is silent.
    """
    a, b = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    events: list[torch.cuda.Event] = []
    clocks: list[float] = []
    powers: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        for _ in range(_AT_ONCE):
            torch.mm(a, b, out=out)
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        events[-_AT_ONCE // 2].synchronize()
        if time.perf_counter() - started > SECONDS / 2:
            clock, power = _state(device)
            clocks += [clock] if clock else []
            powers += [power] if power else []
    torch.cuda.synchronize(device)
    half = events[len(events) // 2 :]
    seconds = half[0].elapsed_time(half[-1]) / 1e3 / (len(half) - 1)
    return {
        "flops_per_second": 2 * SIZE**3 / seconds,
        "clock_mhz": statistics.median(clocks) if clocks else None,
        "power_watts": statistics.median(powers) if powers else None,
        "power_limit_watts": _power_limit(device),
    }


def _handle(device: torch.device) -> Any:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def _state(device: torch.device) -> tuple[float | None, float | None]:
    try:
        handle = _handle(device)
        clock = float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        return clock, pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    except pynvml.NVMLError:
        return None, None


def _power_limit(device: torch.device) -> float | None:
    try:
        return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(_handle(device)) / 1e3)
    except pynvml.NVMLError:
        return None
