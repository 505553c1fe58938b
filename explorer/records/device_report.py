"""The report of a profiler on its device before the first trial of a job."""

from __future__ import annotations

from pydantic import Field

from bexp.explorer.model.hardware import DeviceSupport, HardwareSpec
from bexp.explorer.records.earlier_runs import EarlierRuns
from bexp.explorer.records.run_report import ReportedRun
from bexp.explorer.request.request import ExplorationRequest


class DeviceReport(DeviceSupport):
    """A profiler's description of its device before the first trial of a job."""

    refusal: str | None = Field(None, description="Why the target cannot measure this model here.")
    reported_runs: tuple[ReportedRun, ...] = Field(
        (), description="Real runs with this model on such a device that were reported when the exploration began."
    )
    earlier: EarlierRuns = Field(
        EarlierRuns(), description="Components that may be reused, as they were known when the exploration began."
    )

    def commanded(self, request: ExplorationRequest) -> ExplorationRequest:
        """Return the request with the batch and the base of a training command, where the request states none."""
        if self.parts is None or self.parts.batch_size is None:
            return request
        batch_size = request.batch_size or self.parts.batch_size
        base = request.base_micro_batch_size or self.parts.micro_batch_size
        return request.model_copy(update={"batch_size": batch_size, "base_micro_batch_size": base})

    @classmethod
    def refused(cls, hardware: HardwareSpec, reason: str) -> DeviceReport:
        """Return the report of a target that cannot measure the request's model."""
        return cls(hardware=hardware, attention_backends=(), default_attention="none", refusal=reason)
