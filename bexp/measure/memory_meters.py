"""Meters of the bytes that tensors hold on a device, and of their peak."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

import torch

from bexp.measure.cpu_storages import LiveStorages


class ByteMeter(Protocol):
    """Counts bytes within its context. `reset_peak` begins a new peak at the present level."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def level(self) -> int:
        """Bytes allocated now."""

    def peak(self) -> int:
        """The most bytes that were allocated at one time since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin a new peak."""


class CudaMeter:
    """Reads the counts of the caching allocator, which costs the device nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def level(self) -> int:
        """`memory_allocated`."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """`max_memory_allocated`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """`reset_peak_memory_stats`."""
        torch.cuda.reset_peak_memory_stats(self._device)


class HostMeter:
    """Counts the storages that operations create, but not those that exist already.

    Everything runs eagerly within the context, for two reasons: the meter cannot see the allocations of compiled code,
    and torch never compiles code that once ran under a dispatch mode. So the meter does not see what fusing saves.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        self._storages = LiveStorages(existing)
        self._eager = ExitStack()

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and importing it takes seconds
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        self._storages.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._storages.__exit__(kind, error, traceback)
        self._eager.close()

    def level(self) -> int:
        """Bytes created and not freed."""
        return self._storages.allocated_bytes

    def peak(self) -> int:
        """Highest level."""
        return self._storages.peak_bytes

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._storages.reset_peak()


def byte_meter(device: torch.device, existing: Iterable[torch.Tensor]) -> ByteMeter:
    """The meter of `device`; it does not count `existing` tensors."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter(existing)
