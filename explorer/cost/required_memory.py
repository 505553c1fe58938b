"""The bytes that candidates of a composition require, from predicted or measured activations."""

from __future__ import annotations

import numpy as np

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.composition import Composition, Floats, Ints
from bexp.explorer.cost.step import FRAGMENTATION, MARGIN_BYTES
from bexp.explorer.model.hardware import HardwareSpec


def predict_component_table(table: Composition) -> Floats:
    """Return the predicted saved, forward-peak and backward-peak bytes of the table's components, shape (3, K)."""
    sizes = [predict_component_bytes(c, table.model, table.request) for c in table.components]
    return np.array([[getattr(s, name) for s in sizes] for name in ("saved", "forward_peak", "backward_peak")], float)


def predict_memory(table: Composition, hardware: HardwareSpec, *, activation_share: float = 1.0) -> Floats:
    """Return the bytes that every candidate requires, shape (C,): reserved, context and margin.

    `activation_share` scales the activations. A share below 1 shows what would fit if the prediction were too high.
    """
    saved, transient = table.activation_bytes(*predict_component_table(table))
    return required_table(table, activation_share * (saved + transient), hardware)


def required_table(
    table: Composition, activations: Floats, hardware: HardwareSpec, rows: Ints | slice = slice(None)
) -> Floats:
    """Return the bytes that candidates require with these activations at the peak; the last axis is the rows."""
    peak = table.static_bytes_C[rows] + activations
    reserved = peak * (1 + FRAGMENTATION[table.request.allocator])
    return np.asarray(reserved + hardware.context_bytes + MARGIN_BYTES[hardware.device_kind])
