"""Timings of a device that was shared or throttled: they are told as such, made again, and never learnt from."""

from __future__ import annotations

from explorer.measurements import Measurement, Outcome

TAINTED_ATTEMPTS = 3
"""How often a component is measured before it counts as one that cannot be measured here."""


def judge(measurement: Measurement) -> Measurement:
    """A measurement that went well, but of which some part is tainted, is tainted; any other stays what it is."""
    if measurement.outcome is not Outcome.OK or measurement.taint is None:
        return measurement
    return measurement.model_copy(update={"outcome": Outcome.TAINTED, "reason": measurement.taint})
