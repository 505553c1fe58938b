"""The lines of a recorded table: JSON Lines, first a header, then one line for each run.

Version 1. Every line is an object with a `type`:

- `header` (`RecordingHeader`): the request, the device with its versions and back ends, and the meaning of a run.
- `component` (`ComponentRow`): one run of one component. Candidates are not listed: they are enumerated
  from the header's request and device, and share components.
- `whole_model` (`WholeModelRow`): one run of a candidate's whole model.

Fields with their default value are left out. Seconds and bytes are as in `bexp.explorer.records.measurement`. Lines are
only appended, so that an interrupted recording can be continued; a last line without its end is ignored.
`benchmarks.record` writes them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.base import Frozen
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import (
    ComponentFigures,
    ComponentMeasurement,
    Conditions,
    Outcome,
    PhaseSeconds,
    Seconds,
    WholeModelMeasurement,
)
from bexp.explorer.request.request import ExplorationRequest

FORMAT = "bexp-recording"
VERSION: Literal[1] = 1


class RecordingHeader(Frozen):
    """The first line of a table.

    `request` was recorded on the device of `report`. `process_start_seconds` is the cost of replacing a profiler
    process. `noise` says in words what differs between two runs.
    """

    type: Literal["header"] = "header"
    format: Literal["bexp-recording"] = "bexp-recording"
    version: Literal[1] = VERSION
    name: Annotated[str, Field(min_length=1, max_length=128)]
    request: ExplorationRequest
    report: DeviceReport
    recorded_at: datetime
    process_start_seconds: Seconds = 0.0
    noise: str


class ComponentRow(Frozen):
    """One run of one component, or how it failed.

    `phases` are its seconds; `messaging` includes all time outside of other phases. A row is `inferred` if nothing was
    run, because a smaller component of the same sort had failed. `replaced` says that the profiler process did not
    survive the run. A row with the outcome `contaminated` was timed on a shared or throttled device; it has no figures,
    and no answer uses it. `conditions` leave out values that are equal in all rows or say little.
    """

    type: Literal["component"] = "component"
    component: Component
    run: Annotated[int, Field(ge=0)]
    outcome: Outcome = Outcome.OK
    reason: str | None = None
    figures: ComponentFigures | None = None
    phases: PhaseSeconds = PhaseSeconds()
    conditions: Conditions | None = None
    inferred: bool = False
    replaced: bool = False

    def measurement(self) -> ComponentMeasurement:
        """The measurement of a successful run."""
        assert self.figures is not None, "this run failed"
        return ComponentMeasurement(component=self.component, conditions=self.conditions, **self.figures.model_dump())


class WholeModelRow(Frozen):
    """One run of a candidate's whole model, or how it failed; fields as in `ComponentRow`."""

    type: Literal["whole_model"] = "whole_model"
    candidate: Candidate
    run: Annotated[int, Field(ge=0)]
    outcome: Outcome = Outcome.OK
    reason: str | None = None
    figures: WholeModelMeasurement | None = None
    phases: PhaseSeconds = PhaseSeconds()
    conditions: Conditions | None = None
    replaced: bool = False


Row = Annotated[RecordingHeader | ComponentRow | WholeModelRow, Field(discriminator="type")]
ROWS: TypeAdapter[RecordingHeader | ComponentRow | WholeModelRow] = TypeAdapter(Row)
