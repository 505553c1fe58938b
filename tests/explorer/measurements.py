"""What a component took, with what a test says nothing of left at plain figures."""

from __future__ import annotations

from typing import Any

from bexp.explorer.cost.components import Component
from bexp.explorer.records.measurement import ComponentMeasurement


def measured(component: Component, seconds: float = 1.0, **changes: Any) -> ComponentMeasurement:
    """Return a component's measurement of so many device seconds, a third of them forward, without bytes or error."""
    figures = {"device_seconds": seconds, "host_seconds": 0.0, "forward_device_seconds": seconds / 3, "repeats": 10}
    figures |= {"standard_error_seconds": 0.0, "saved_bytes": 0, "forward_peak_bytes": 0, "backward_peak_bytes": 0}
    return ComponentMeasurement.model_validate({"component": component, **figures, **changes})
