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
        """Seconds to a later one; on CUDA the device must have reached both."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """Now, by the wall clock."""

    at: float = field(default_factory=time.perf_counter)

    def seconds_until(self, later: Mark) -> float:
        """Seconds between the two."""
        assert isinstance(later, HostMark)
        return later.at - self.at


class CudaMark:
    """When the current stream gets here."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_until(self, later: Mark) -> float:
        """Seconds between the two."""
        assert isinstance(later, CudaMark)
        return float(self._event.elapsed_time(later._event)) / 1e3


def mark_of(device: torch.device) -> Callable[[], Mark]:
    """Makes marks on a device."""
    return CudaMark if device.type == "cuda" else HostMark
