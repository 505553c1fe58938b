"""Amounts of work and memory that components are expected to take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations and bytes moved of one pass."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class ComponentBytes:
    """Bytes over the level before the component's forward, as `ComponentMeasurement` defines them."""

    saved: int
    forward_peak: int
    backward_peak: int
