"""Moments on a device, and the seconds between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from bexp.measure.host_time import HostMark


class Mark(Protocol):
    """A moment on the device."""

    def seconds_until(self, later: Any) -> float:
        """Seconds from this moment to `later`, of the same kind; on CUDA the device must have reached both."""


class CudaMark:
    """The moment at which the current stream gets to this point."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_until(self, later: CudaMark) -> float:
        """Seconds from this mark to `later`."""
        return float(self._event.elapsed_time(later._event)) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; the CPU has done its work already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark_of(device: torch.device, *, alone: bool = True) -> Callable[[], Mark]:
    """Return the maker of marks on `device`; `alone` is false where processes wait for each other."""
    return CudaMark if device.type == "cuda" else partial(HostMark, alone=alone)
