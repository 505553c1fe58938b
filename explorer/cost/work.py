"""Amounts of work and memory of components."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations and bytes moved of one pass."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class ComponentBytes:
    """Bytes above the level before the component's forward pass, as `ComponentMeasurement` defines them."""

    saved: int
    forward_peak: int
    backward_peak: int
