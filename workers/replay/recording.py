"""A recorded table: reading it, appending to it, and the requests that it covers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from bexp.explorer.cost_model.components import Component
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.search.pruned_space import PrunedSpace, prune_space
from bexp.explorer.spec.base import rule_of
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.model import ModelSpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.replay.rows import FORMAT, ROWS, VERSION, ComponentRow, RecordingHeader, WholeModelRow, encode_row


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
        lines = _whole_lines(path)
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
        """The space of a request on the recorded device."""
        return prune_space(model, request, self.header.report)

    def missing_sizes(self, request: ExplorationRequest, model: ModelSpec) -> tuple[int, ...]:
        """The micro-batch sizes in a request's space with a candidate that cannot be composed.

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

    def covered_request(self) -> ExplorationRequest:
        """The recorded request for its main model, with only those micro-batch sizes that were recorded completely.

        Raises:
            RecordingError: no size was recorded completely.
        """
        request = self.header.request.model_copy(update={"num_query_groups": None, "capacity_factors": None})
        missing = set(self.missing_sizes(request, request.shapes))
        if not missing:
            return request
        covered = tuple(m for m in request.space.micro_batch_sizes if m not in missing)
        base = request.base_micro_batch_size
        cut = request.model_copy(
            update={"micro_batch_size": covered, "base_micro_batch_size": None if base in missing else base}
        )
        if not covered or self.prune(cut, cut.shapes).table is None:
            raise RecordingError(f"the table '{self.header.name}' has no micro-batch size that was recorded in full")
        return cut


class RecordingFile:
    """A table that is being written. Each row is on disk when `append` returns."""

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        """Create the file, or continue it. An incomplete last line, left by a killed recorder, is cut off."""
        self.path = path
        if path.exists():
            self.recording = Recording.read(path)
            with path.open("r+b") as file:
                file.truncate(sum(len(line) + 1 for line in _whole_lines(path)))
            self._file = path.open("ab")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.recording = Recording(header)
            self._file = path.open("xb")
            self._write(encode_row(header))

    def append(self, row: ComponentRow | WholeModelRow) -> None:
        """Write a row, and add it to `recording`."""
        self._write(encode_row(row))
        self.recording.add(row)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: str) -> None:
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def _whole_lines(path: Path) -> list[bytes]:
    """The complete lines of a file."""
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
