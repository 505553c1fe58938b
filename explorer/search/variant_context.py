"""The context of the search of one variant: its model and device, and what it shares with the job's other variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bexp.explorer.model.model import Variant
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.trial_executor import TrialExecutor


@dataclass(frozen=True, slots=True)
class VariantContext:
    """One variant of a job. `index` counts the job's variants; 0 is the main one, whose model is the request's own."""

    index: int
    model: ExploredModel
    request: ExplorationRequest
    report: DeviceReport
    executor: TrialExecutor
    history: TrialHistory
    clock: Callable[[], float]

    @property
    def is_main(self) -> bool:
        """Whether it is the variant whose recommendation is the job's."""
        return self.index == 0

    @property
    def variant(self) -> Variant:
        """The identity of the variant within its job."""
        return self.model.variant

    @property
    def trials(self) -> list[Trial]:
        """The trials of this variant so far, in order."""
        return self.history.trials_of(self.variant)
