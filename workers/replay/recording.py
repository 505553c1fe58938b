"""A recorded table: JSON Lines, first a header, then one line for each run, and the requests that it covers.

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

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.base import Frozen, rule_of
from bexp.explorer.model.model import ModelSpec
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
from bexp.explorer.search.legal_space import PrunedSpace, prune_space

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


class RecordingError(ValueError):
    """The file is no recorded table, or has a version that cannot be read."""


class Recording:
    """A header, and the runs of each component and of each whole model, in the order of recording.

    Runs on a shared or throttled device are kept apart in `contaminated`, and no answer uses them.
    """

    def __init__(self, header: RecordingHeader, rows: Iterable[ComponentRow | WholeModelRow] = ()) -> None:
        self.header = header
        self.components: dict[Component, list[ComponentRow]] = {}
        self.whole_models: dict[Candidate, list[WholeModelRow]] = {}
        self.contaminated: list[ComponentRow | WholeModelRow] = []
        for row in rows:
            self.add(row)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file.

        Raises:
            RecordingError: the file is no recorded table; the message names the line.
            OSError: the file cannot be read.
        """
        lines = whole_lines(path)
        header = _parse(path, 1, lines[0]) if lines else None
        if not isinstance(header, RecordingHeader):
            raise RecordingError(f"{path} is no recorded table: its first line is no header ({FORMAT} {VERSION})")
        recording = cls(header)
        for number, line in enumerate(lines[1:], start=2):
            row = _parse(path, number, line)
            if isinstance(row, RecordingHeader):
                raise RecordingError(f"{path}, line {number}: a second header")
            recording.add(row)
        return recording

    def add(self, row: ComponentRow | WholeModelRow) -> None:
        """Keep a run."""
        if row.outcome is Outcome.CONTAMINATED:
            self.contaminated.append(row)
        elif isinstance(row, ComponentRow):
            self.components.setdefault(row.component, []).append(row)
        else:
            self.whole_models.setdefault(row.candidate, []).append(row)

    def prune(self, request: ExplorationRequest, model: ModelSpec) -> PrunedSpace:
        """Return the space of a request on the recorded device."""
        return prune_space(model, request, self.header.report)

    def missing_sizes(self, request: ExplorationRequest, model: ModelSpec) -> tuple[int, ...]:
        """Return the micro-batch sizes in a request's space with a candidate that cannot be composed.

        Only the first base is required, because the others are needed only if the first does not fit.
        """
        pruned = self.prune(request, model)
        if pruned.table is None:
            return ()
        wanted = {*pruned.legal.candidates, pruned.bases[0]}
        rows = [row for candidate, row in pruned.table.row.items() if candidate in wanted]
        recorded_K = np.array([c in self.components for c in pruned.table.components])
        lacking = (pruned.table.uses_CK[rows] & ~recorded_K[None, :]).any(axis=1)
        return tuple(sorted({int(m) for m in pruned.table.micro_batch_C[rows][lacking]}))


def whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file."""
    *lines, _ = path.read_bytes().split(b"\n")
    return lines


def _parse(path: Path, number: int, line: bytes) -> RecordingHeader | ComponentRow | WholeModelRow:
    try:
        return ROWS.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{where}: {rule_of(first)}" if where else rule_of(first)
        raise RecordingError(f"{path}, line {number}: {message}") from error
