"""Memory that every candidate of a table is predicted to need, before anything is measured."""

from __future__ import annotations

import numpy as np

from explorer.composition import FRAGMENTATION, MARGIN_BYTES
from explorer.footprint import predict_component_bytes
from explorer.hardware import HardwareSpec
from explorer.table import Floats, Ints, SpaceTable


def predict_component_table(table: SpaceTable) -> Floats:
    """Predicted saved, forward-peak and backward-peak bytes of the table's components, shape (3, K)."""
    sizes = [predict_component_bytes(c, table.model, table.request) for c in table.components]
    return np.array([[getattr(s, name) for s in sizes] for name in ("saved", "forward_peak", "backward_peak")], float)


def predict_memory(table: SpaceTable, hardware: HardwareSpec, *, activation_share: float = 1.0) -> Floats:
    """Required bytes of every candidate, shape (C,): reserved, context and margin.

    `activation_share` scales the activations, to ask what would fit if the prediction were too high.
    """
    saved, transient = table.activation_bytes(*predict_component_table(table))
    return required_table(table, activation_share * (saved + transient), hardware)


def required_table(
    table: SpaceTable, activations: Floats, hardware: HardwareSpec, rows: Ints | slice = slice(None)
) -> Floats:
    """Required bytes of candidates with these activation bytes at the peak; the last axis is that of the rows."""
    peak = table.static_bytes_C[rows] + activations
    return np.asarray(peak * (1 + FRAGMENTATION) + hardware.context_bytes + MARGIN_BYTES[hardware.device_kind])
