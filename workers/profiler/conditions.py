"""The conditions of a timing, as they are stored."""

from __future__ import annotations

from dataclasses import asdict

from bexp.explorer.records.measurement import Conditions
from bexp.measure.device_monitor import Watch


def watched_conditions(watch: Watch) -> Conditions:
    """Return what `watch` read from the device, as a record."""
    return Conditions(**asdict(watch.conditions()))
