"""A recorded table that is being written: its rows, made of trials, and its file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import ComponentFigures, Conditions, Measurement, Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.replay.recording import (
    ComponentRow,
    Recording,
    RecordingError,
    RecordingHeader,
    WholeModelRow,
    whole_lines,
)

SIGNIFICANT_DIGITS = 6


class RecordingFile:
    """A table that is being written. Each row is on disk when `append` returns."""

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        """Create the file, or continue it. An incomplete last line, left by a killed recorder, is cut off."""
        self.path = path
        if path.exists():
            self.recording = Recording.read(path)
            with path.open("r+b") as file:
                file.truncate(sum(len(line) + 1 for line in whole_lines(path)))
            self._file = path.open("ab")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.recording = Recording(header)
            self._file = path.open("xb")
            self._write(encode_row(header))

    def append(self, row: ComponentRow | WholeModelRow) -> None:
        self._write(encode_row(row))
        self.recording.add(row)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def component_row(component: Component, run: int, measurement: Measurement, *, replaced: bool) -> ComponentRow:
    measured = next((m for m in measurement.components if m.component == component), None)
    figures = None
    if measured is not None and measurement.outcome is Outcome.OK:
        figures = ComponentFigures(**measured.model_dump(exclude={"component", "conditions"}))
    return ComponentRow(
        component=component,
        run=run,
        outcome=measurement.outcome,
        reason=measurement.reason,
        figures=figures,
        phases=measurement.phases.model_copy(update={"process_start": 0.0}),
        conditions=_condense(measured.conditions) if measured else None,
        replaced=replaced,
    )


def whole_model_row(candidate: Candidate, run: int, measurement: Measurement, *, replaced: bool) -> WholeModelRow:
    whole = measurement.whole_model
    ok = measurement.outcome is Outcome.OK and whole is not None
    return WholeModelRow(
        candidate=candidate,
        run=run,
        outcome=measurement.outcome,
        reason=measurement.reason,
        figures=whole.model_copy(update={"conditions": None}) if ok and whole else None,
        phases=measurement.phases.model_copy(update={"process_start": 0.0}),
        conditions=_condense(whole.conditions) if whole else None,
        replaced=replaced,
    )


def covered_request(recording: Recording) -> ExplorationRequest:
    """The recorded request for its main model, with only those micro-batch sizes that were recorded completely.

    Raises:
        RecordingError: no size was recorded completely.
    """
    request = recording.header.request.model_copy(update={"num_query_groups": None, "capacity_factors": None})
    missing = set(recording.missing_sizes(request, request.shapes))
    if not missing:
        return request
    covered = tuple(m for m in request.space.micro_batch_sizes if m not in missing)
    base = request.base_micro_batch_size
    cut = request.model_copy(
        update={"micro_batch_size": covered, "base_micro_batch_size": None if base in missing else base}
    )
    if not covered or recording.prune(cut, cut.shapes).table is None:
        raise RecordingError(f"the table '{recording.header.name}' has no micro-batch size that was recorded in full")
    return cut


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
