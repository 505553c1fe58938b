"""What an export is made from: an exploration with what it has stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest


@dataclass(frozen=True, slots=True)
class ExportSource:
    """An exploration. `missing` says in a sentence why nothing is recommended; it is used if nothing is."""

    id: str
    request: ExplorationRequest | None
    report: DeviceReport | None
    recommendation: Recommendation | None
    trials: Sequence[Trial] = ()
    final: bool = True
    missing: str = "The exploration has nothing to recommend."
