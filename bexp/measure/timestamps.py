"""Moments on a device, and the seconds between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Mark(Protocol):
    """A moment on the device."""

    def seconds_until(self, later: Mark) -> float:
        """Seconds from this moment to `later`; on CUDA the device must have reached both."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """The present moment, by the wall clock."""

    at: float = field(default_factory=time.perf_counter)

    def seconds_until(self, later: Mark) -> float:
        """Seconds from this mark to `later`."""
        assert isinstance(later, HostMark)
        return later.at - self.at


class CudaMark:
    """The moment at which the current stream gets to this point."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_until(self, later: Mark) -> float:
        """Seconds from this mark to `later`."""
        assert isinstance(later, CudaMark)
        return float(self._event.elapsed_time(later._event)) / 1e3


def mark_of(device: torch.device) -> Callable[[], Mark]:
    """Return what makes marks on `device`."""
    return CudaMark if device.type == "cuda" else HostMark
