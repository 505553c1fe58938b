"""The source of an export: an exploration with its stored records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest


@dataclass(frozen=True, slots=True)
class ExportSource:
    """An exploration. `missing` is a sentence why nothing is recommended, for the case that nothing is."""

    id: str
    request: ExplorationRequest | None
    report: DeviceReport | None
    recommendation: Recommendation | None
    trials: Sequence[Trial] = ()
    final: bool = True
    missing: str = "The exploration has nothing to recommend."
