"""The report of a profiler on its device before the first trial of a job, with what earlier explorations measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.model.base import Frozen
from bexp.explorer.model.hardware import DeviceSupport, HardwareSpec
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.records.run_report import ReportedRun
from bexp.explorer.request.request import ExplorationRequest


class EarlierRun(Frozen):
    """One run of a component, and its age when this exploration began."""

    measurement: ComponentMeasurement
    age_seconds: Annotated[float, Field(ge=0)]


class EarlierRuns(Frozen):
    """The runs that an exploration may reuse, fixed when it begins, so that a resumed one sees the same.

    `num_ignored` counts components of the same model that are not reused, because they were measured with the versions
    in `other_versions`.
    """

    runs: tuple[EarlierRun, ...] = ()
    num_explorations: Annotated[int, Field(ge=0)] = Field(0, description="Explorations that measured them.")
    num_ignored: Annotated[int, Field(ge=0)] = 0
    other_versions: tuple[str, ...] = ()


class ReusedComponents(Frozen):
    """The components that an answer has from earlier explorations.

    `num_checked` of the components were measured again before the others were trusted. They differ by at most
    `largest_difference`, a share of the earlier time.
    """

    num_components: Annotated[int, Field(ge=0)] = Field(description="Reused, and not measured again since.")
    num_explorations: Annotated[int, Field(ge=1)]
    num_checked: Annotated[int, Field(ge=1)]
    largest_difference: Annotated[float, Field(ge=0)]


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
