"""Composes the components of a recorded table to the seconds and bytes of every candidate, from all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, Floats, Ints, required_table
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.workers.replay.recording import Recording

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ComponentArrays:
    """Figures of a table's components, in its order, of shape (K,). Components that are not `known` have zeros.

    `sizes`, of shape (3, K), are saved, forward-peak and backward-peak bytes.
    """

    known: Mask
    device_seconds: Floats
    host_seconds: Floats
    sizes: Floats


def arrays_of(
    table: Composition, measured: Mapping[Component, ComponentMeasurement], *, host_is_device: bool
) -> ComponentArrays:
    """Measurements as arrays. A component that waits for its device, as all do on a CPU, has no host time beside it."""
    number = len(table.components)
    known_K = np.zeros(number, dtype=np.bool_)
    device_K, host_K, bytes_3K = np.zeros(number), np.zeros(number), np.zeros((3, number))
    for i, component in enumerate(table.components):
        measurement = measured.get(component)
        if measurement is None:
            continue
        known_K[i] = True
        device_K[i] = measurement.device_seconds
        waits = host_is_device or measurement.host_seconds == measurement.device_seconds
        host_K[i] = 0.0 if waits else measurement.host_seconds
        bytes_3K[:, i] = (measurement.saved_bytes, measurement.forward_peak_bytes, measurement.backward_peak_bytes)
    return ComponentArrays(known_K, device_K, host_K, bytes_3K)


def compose(recording: Recording, table: Composition) -> ComponentArrays:
    """Every component by the geometric mean of its runs; one that failed in half of them or more is unknown."""
    averaged: dict[Component, ComponentMeasurement] = {}
    for component, rows in recording.components.items():
        well = [row.measurement() for row in rows if row.figures is not None]
        if 2 * len(well) <= len(rows):
            continue
        device = _geometric_mean(well, lambda m: m.device_seconds)
        waits = all(m.host_seconds == m.device_seconds for m in well)
        averaged[component] = well[0].model_copy(
            update={
                "device_seconds": device,
                "host_seconds": device if waits else _geometric_mean(well, lambda m: m.host_seconds),
                "saved_bytes": max(m.saved_bytes for m in well),
                "forward_peak_bytes": max(m.forward_peak_bytes for m in well),
                "backward_peak_bytes": max(m.backward_peak_bytes for m in well),
            }
        )
    host_is_device = recording.header.report.hardware.device_kind == "cpu"
    return arrays_of(table, averaged, host_is_device=host_is_device)


def composed_tokens_per_second(table: Composition, figures: ComponentArrays) -> Floats:
    """Return tokens/s of candidates, shape (C,). A candidate with an unknown component has no meaningful value."""
    with np.errstate(divide="ignore"):
        return np.asarray(table.tokens_per_second(figures.device_seconds[None, :], figures.host_seconds)[0])


def known_rows(table: Composition, figures: ComponentArrays) -> Mask:
    """Candidates whose every component is known, shape (C,)."""
    return np.logical_not((table.uses_CK & ~figures.known[None, :]).any(axis=1))


def fitting_rows(table: Composition, figures: ComponentArrays, hardware: HardwareSpec) -> Ints:
    """Candidates whose every component is known and that need no more than the limit."""
    activations = np.add(*table.activation_bytes(*figures.sizes))
    required = required_table(table, activations, hardware)
    return np.flatnonzero(known_rows(table, figures) & (required <= memory_limit(table.request, hardware)))


def _geometric_mean(runs: list[ComponentMeasurement], value: Callable[[ComponentMeasurement], float]) -> float:
    return float(np.exp(np.mean([np.log(max(value(m), 1e-12)) for m in runs])))
