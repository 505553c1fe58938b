"""A recorded table in memory, and the requests that it covers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.base import rule_of
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import PrunedSpace, prune_space
from bexp.workers.replay.rows import FORMAT, ROWS, VERSION, ComponentRow, RecordingHeader, WholeModelRow


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
