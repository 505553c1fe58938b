"""The peak of a device's memory, or of this process's on a CPU."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from bexp.measure.heap import trim


def reset_peak(device: torch.device) -> None:
    """Begin a new peak of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        gc.collect()
        trim()  # memory that earlier sizes have freed is still resident
        _forget_peak()


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """Return the peaks of allocated and of reserved bytes on a device; on a CPU both are those of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    peak = _resident_peak()
    return peak, peak


def _forget_peak() -> None:
    """Let the kernel begin a new resident peak of this process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _resident_peak() -> int:
    """The most bytes of this process that were resident; 0 if the kernel does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
