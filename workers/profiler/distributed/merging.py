"""Merges the results of several ranks. A step waits for the slowest rank, and must fit on the one that needs most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.measurement import ComponentMeasurement, Conditions, WholeModelMeasurement
from bexp.workers.process.protocol import TrialFinished

M = TypeVar("M", ComponentMeasurement, WholeModelMeasurement)

OPTIONAL = (
    *("host_once_seconds", "slowdown", "waiting_forward_seconds"),
    *("together_forward_seconds", "together_backward_seconds", "together_host_backward_seconds"),
)
"""Figures that not every component has."""


def merge_hardware(specs: Sequence[HardwareSpec]) -> HardwareSpec:
    """Describe the group as equal devices, each as slow and as small as the worst. Ranks on the CPU share its memory.

    Raises:
        ValueError: the devices are not alike.
    """
    first = specs[0]
    names = sorted({spec.device_name for spec in specs})
    if len(names) > 1:
        raise ValueError(f"the devices of a group must be alike, not {' and '.join(names)}")
    limit = min(spec.memory_limit_bytes for spec in specs)
    peaks = first.matmul_flops_per_second
    return first.model_copy(
        update={
            "num_devices": len(specs),
            "memory_limit_bytes": limit if first.device_kind == "cuda" else max(1, limit // len(specs)),
            "context_bytes": max(spec.context_bytes for spec in specs),
            "matmul_flops_per_second": {
                dtype: min(spec.matmul_flops_per_second[dtype] for spec in specs)
                for dtype in peaks
                if all(dtype in spec.matmul_flops_per_second for spec in specs)
            },
            "memory_bandwidth_bytes_per_second": min(spec.memory_bandwidth_bytes_per_second for spec in specs),
            "launch_seconds": max(spec.launch_seconds for spec in specs),
        }
    )


def merge_component(measurements: Sequence[ComponentMeasurement]) -> ComponentMeasurement:
    """Take the largest of every figure, and the smallest number of repeats. One rank's disturbed device counts."""
    assert len({measured.component for measured in measurements}) == 1, (
        "the ranks run the same components in the same order"
    )
    slowest = max(measurements, key=lambda measured: measured.device_seconds)
    return slowest.model_copy(
        update={
            "host_seconds": max(measured.host_seconds for measured in measurements),
            "forward_device_seconds": max(measured.forward_device_seconds for measured in measurements),
            "standard_error_seconds": max(measured.standard_error_seconds for measured in measurements),
            "repeats": min(measured.repeats for measured in measurements),
            "saved_bytes": max(measured.saved_bytes for measured in measurements),
            "forward_peak_bytes": max(measured.forward_peak_bytes for measured in measurements),
            "backward_peak_bytes": max(measured.backward_peak_bytes for measured in measurements),
            **{name: _largest(getattr(measured, name) for measured in measurements) for name in OPTIONAL},
            "conditions": _worst_conditions(slowest, measurements),
        }
    )


def _worst_conditions(slowest: M, measurements: Sequence[M]) -> Conditions | None:
    """Return the conditions of a rank whose device was disturbed, for which the others waited; else the slowest's."""
    disturbed = (measured.conditions for measured in measurements if measured.contamination is not None)
    return next(disturbed, slowest.conditions)


def _largest(figures: Iterable[float | None]) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)


def merge_trial(trials: Sequence[TrialFinished]) -> TrialFinished:
    """Merge the results of ranks that all had the same outcome."""
    measurements = [finished.measurement for finished in trials]
    components = zip(*(measurement.components for measurement in measurements), strict=True)
    whole = [m.whole_model for m in measurements if m.whole_model is not None]
    slowest = max(trials, key=lambda finished: finished.seconds)  # whose phases add up to its time
    merged = slowest.measurement.model_copy(
        update={
            "components": tuple(merge_component(ranks) for ranks in components),
            "whole_model": _merge_whole_model(whole) if whole else None,
        }
    )
    poisoned = any(finished.poisoned for finished in trials)
    return slowest.model_copy(update={"measurement": merged, "poisoned": poisoned})


def _merge_whole_model(measurements: Sequence[WholeModelMeasurement]) -> WholeModelMeasurement:
    """Take micro-step and communication of the slowest rank: the others' communication includes their wait for it."""
    on_mesh = measurements[0].num_micro_batches is not None  # whose ranks wait for each other, and update unlike shares
    slowest = max(measurements, key=lambda whole: whole.mesh_step_seconds if on_mesh else whole.micro_step_seconds)
    optimizer = [slowest] if on_mesh else measurements
    return slowest.model_copy(
        update={
            "optimizer_seconds": max(whole.optimizer_seconds for whole in optimizer),
            "standard_error_seconds": max(whole.standard_error_seconds for whole in measurements),
            "peak_bytes": max(whole.peak_bytes for whole in measurements),
            "reserved_bytes": max(whole.reserved_bytes for whole in measurements),
            "repeats": min(whole.repeats for whole in measurements),
            "conditions": _worst_conditions(slowest, measurements),
        }
    )
