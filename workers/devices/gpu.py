"""The NVML handle of a device that a process names."""

from __future__ import annotations

from collections.abc import Mapping

from bexp.measure.nvml import Gpu
from bexp.workers.devices.discovery import device_key


def open_gpu(device: str, environment: Mapping[str, str]) -> Gpu | None:
    """The GPU that this process calls `device`; None for the CPU, and if NVML does not find the device."""
    try:
        key = device_key(device, environment)
    except ValueError:
        return None
    return None if key == "cpu" else Gpu.open(key)
