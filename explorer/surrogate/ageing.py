"""How much less an earlier run of a component says than a run of today."""

from __future__ import annotations

import math

from bexp.explorer.records.earlier_runs import EarlierRun
from bexp.explorer.records.measurement import ComponentMeasurement

SECONDS_A_DAY = 86_400.0
BETWEEN_JOBS_STD = {"cuda": 0.004, "cpu": 0.03}
"""Relative standard deviation between explorations, beyond that between two runs of one process.

A process of its own, other clocks and other temperatures. On one H200, 44 components that two or three jobs measured
differ by 0.6% in the median, all causes together (`bexp.explorer.surrogate.hyperparameters`).
"""
DAILY_STD = {"cuda": 0.002, "cpu": 0.01}
"""The relative standard deviation that one day adds; it grows with the square root of the age. It is assumed."""


def age_run(run: EarlierRun, device_kind: str) -> ComponentMeasurement:
    """Return the measurement of an earlier run with a standard error that is widened by its age."""
    found = run.measurement
    drift = DAILY_STD[device_kind] * math.sqrt(run.age_seconds / SECONDS_A_DAY)
    added = math.hypot(BETWEEN_JOBS_STD[device_kind], drift) * found.device_seconds
    return found.model_copy(update={"standard_error_seconds": math.hypot(found.standard_error_seconds, added)})
