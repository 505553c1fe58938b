"""The lines of a recorded table: JSON Lines, first a header, then one line for each run.

Version 1. Every line is an object with a `type`:

- `header` (`RecordingHeader`): the request, the device with its versions and back ends, and the meaning of a run.
- `component` (`ComponentRow`): one run of one component. Candidates are not listed: they are enumerated
  from the header's request and device, and share components.
- `whole_model` (`WholeModelRow`): one run of a candidate's whole model.

Fields with their default value are left out. Seconds and bytes are as in `bexp.explorer.records.measurement`. Lines are
only appended, so that an interrupted recording can be continued; a last line without its end is ignored.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator

from bexp.explorer.cost_model.components import Component
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import (
    ComponentFigures,
    ComponentMeasurement,
    Conditions,
    Measurement,
    Outcome,
    PhaseSeconds,
    Seconds,
    WholeModelMeasurement,
)
from bexp.explorer.spec.base import Frozen
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.request import ExplorationRequest

FORMAT = "bexp-recording"
VERSION: Literal[1] = 1
SIGNIFICANT_DIGITS = 6


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

    @field_validator("request", mode="before")
    @classmethod
    def _name_the_allocator(cls, request: Any) -> Any:
        """Tables that name no allocator were recorded with expandable segments, as all profilers once ran."""
        return {"allocator": "expandable_segments", **request} if isinstance(request, dict) else request


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

    @classmethod
    def of(cls, component: Component, run: int, measurement: Measurement, *, replaced: bool) -> ComponentRow:
        """The row of a trial that measured only `component`."""
        measured = next((m for m in measurement.components if m.component == component), None)
        ok = measurement.outcome is Outcome.OK and measured is not None
        return cls(
            component=component,
            run=run,
            outcome=measurement.outcome,
            reason=measurement.reason,
            figures=ComponentFigures(**measured.model_dump(exclude={"component", "conditions"}))
            if ok and measured
            else None,
            phases=measurement.phases.model_copy(update={"process_start": 0.0}),
            conditions=_condense(measured.conditions) if measured else None,
            replaced=replaced,
        )

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

    @classmethod
    def of(cls, candidate: Candidate, run: int, measurement: Measurement, *, replaced: bool) -> WholeModelRow:
        """The row of a whole-model trial."""
        whole = measurement.whole_model
        ok = measurement.outcome is Outcome.OK and whole is not None
        return cls(
            candidate=candidate,
            run=run,
            outcome=measurement.outcome,
            reason=measurement.reason,
            figures=whole.model_copy(update={"conditions": None}) if ok and whole else None,
            phases=measurement.phases.model_copy(update={"process_start": 0.0}),
            conditions=_condense(whole.conditions) if whole else None,
            replaced=replaced,
        )


Row = Annotated[RecordingHeader | ComponentRow | WholeModelRow, Field(discriminator="type")]
ROWS: TypeAdapter[RecordingHeader | ComponentRow | WholeModelRow] = TypeAdapter(Row)


def encode_row(row: RecordingHeader | ComponentRow | WholeModelRow) -> str:
    """Return one line with its line end. A header is written with all its fields."""
    if isinstance(row, RecordingHeader):
        content = row.model_dump(mode="json")
    else:
        content = {"type": row.type} | _shorten(row.model_dump(mode="json", exclude_defaults=True))
    return json.dumps(content, separators=(",", ":")) + "\n"


def _condense(conditions: Conditions | None) -> Conditions | None:
    """Round the conditions and drop clocks that never change; None if nothing is left."""
    if conditions is None:
        return None
    watts, others, waited = conditions.power_watts, conditions.host_busy_share, conditions.core_wait_share
    condensed = conditions.model_copy(
        update={
            "sm_clock_max_mhz": None,
            "memory_clock_mhz": None,
            "power_watts": None if watts is None else float(round(watts)),
            "host_busy_share": None if others is None else round(others, 2),
            "core_wait_share": None if waited is None else round(waited, 2),
        }
    )
    return None if condensed == Conditions() else condensed


def _shorten(value: Any) -> Any:
    """Round floats to six significant digits, which exceed the precision of any timing."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shorten(item) for item in value]
    return value
