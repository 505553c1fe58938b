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
    """The first line of a table."""

    type: Literal["header"] = "header"
    format: Literal["bexp-recording"] = "bexp-recording"
    version: Literal[1] = VERSION
    name: Annotated[str, Field(min_length=1, max_length=128)]
    request: ExplorationRequest
    """The request whose space was recorded."""
    report: DeviceReport
    """Of the recorded device."""
    recorded_at: datetime
    process_start_seconds: Seconds = 0.0
    """The cost of replacing a profiler process."""
    noise: str
    """The differences between two runs, in words."""


class ComponentRow(Frozen):
    """One run of one component, or how it failed."""

    type: Literal["component"] = "component"
    component: Component
    run: Annotated[int, Field(ge=0)]
    """The number of the run among those of the component."""
    outcome: Outcome = Outcome.OK
    """A run that is `contaminated` was timed on a shared or throttled device: it has no figures, no answer uses it."""
    reason: str | None = None
    """Why the run failed."""
    figures: ComponentFigures | None = None
    """None if the run failed."""
    phases: PhaseSeconds = PhaseSeconds()
    """Seconds of the run; `messaging` includes all time outside of other phases."""
    conditions: Conditions | None = None
    """Without values that are equal in all rows or say little."""
    inferred: bool = False
    """Nothing was run, because a smaller component of the same sort had failed."""
    replaced: bool = False
    """The profiler process did not survive the run."""

    def measurement(self) -> ComponentMeasurement:
        """Return the measurement of a successful run."""
        assert self.figures is not None, "this run failed"
        return ComponentMeasurement(component=self.component, conditions=self.conditions, **self.figures.model_dump())


class WholeModelRow(Frozen):
    """One run of a candidate's whole model, or how it failed. The fields are as in `ComponentRow`."""

    type: Literal["whole_model"] = "whole_model"
    candidate: Candidate
    run: Annotated[int, Field(ge=0)]
    """The number of the run among those of the candidate."""
    outcome: Outcome = Outcome.OK
    reason: str | None = None
    figures: WholeModelMeasurement | None = None
    phases: PhaseSeconds = PhaseSeconds()
    conditions: Conditions | None = None
    replaced: bool = False


Row = Annotated[RecordingHeader | ComponentRow | WholeModelRow, Field(discriminator="type")]
ROWS: TypeAdapter[RecordingHeader | ComponentRow | WholeModelRow] = TypeAdapter(Row)
