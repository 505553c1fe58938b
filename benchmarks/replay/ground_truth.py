"""The ground truth of a recorded table: the throughput of every candidate, and the cost of trying them all."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.recorded_candidates import Mask, compose, composed_tokens_per_second, fitting_rows
from benchmarks.recording_file import covered_request
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, Floats
from bexp.explorer.cost.step import combine_seconds
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import PrunedSpace
from bexp.workers.replay.profiler import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import Recording, RecordingError


@dataclass(frozen=True)
class GroundTruth:
    """A recorded table with its answers. Axes: C candidates, in the order of `table`.

    The truth of a candidate is its whole model if that was timed. Otherwise it is composed from all runs of its
    components and multiplied by the median ratio of whole to composed throughput, so that both are on one scale. A
    candidate is feasible if its composed bytes are within the limit and its whole model did not fail, if it was run.
    """

    name: str
    model_name: str
    recording: Recording
    request: ExplorationRequest
    report: DeviceReport
    prune: PrunedSpace
    table: Composition
    tokens_C: Floats  # noqa: N815 - axes are in names
    legal_C: Mask  # noqa: N815 - axes are in names
    num_whole_models: int
    composition_errors: tuple[float, ...]
    exhaustive_seconds: float
    _singles: dict[int, Composition] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, name: str, recording: Recording) -> GroundTruth:
        """The truth of a table.

        Raises:
            RecordingError: no candidate of it is feasible.
        """
        request = covered_request(recording)
        prune = recording.prune(request, request.shapes)
        table = prune.table
        assert table is not None, "a covered request has a space"
        hardware = recording.header.report.hardware
        figures = compose(recording, table)
        feasible = np.zeros(len(table.candidates), dtype=np.bool_)
        feasible[fitting_rows(table, figures, hardware)] = True
        composed = composed_tokens_per_second(table, figures)
        members = set(prune.legal.candidates)
        legal_C = np.array([c in members for c in table.candidates], dtype=np.bool_)
        whole = {table.row[c]: _whole(recording, table, c) for c in recording.whole_models if c in table.row}
        timed = {row: tokens for row, tokens in whole.items() if tokens is not None and feasible[row]}
        ratios = [tokens / composed[row] for row, tokens in timed.items()]
        tokens_C = np.where(feasible, composed, 0.0) * (float(np.median(ratios)) if ratios else 1.0)
        for row, tokens in timed.items():
            tokens_C[row] = tokens
        for row, rows in ((table.row[c], rows) for c, rows in recording.whole_models.items() if c in table.row):
            if all(r.outcome not in {Outcome.OK, Outcome.UNSUPPORTED} for r in rows):
                tokens_C[row] = 0.0
        tokens_C[~legal_C] = 0.0
        if not np.any(tokens_C > 0):
            raise RecordingError(f"the table '{name}' has no feasible candidate")
        used_K = np.asarray(table.uses_CK[legal_C].any(axis=0))
        costs = [_mean_cost(recording, c) for c, used in zip(table.components, used_K, strict=True) if used]
        return cls(
            name=name,
            model_name=request.shapes.name,
            recording=recording,
            request=request,
            report=recording.header.report,
            prune=prune,
            table=table,
            tokens_C=tokens_C,
            legal_C=legal_C,
            num_whole_models=len(timed),
            composition_errors=tuple(1 / r - 1 for r in ratios),
            exhaustive_seconds=float(sum(costs)),
        )

    @classmethod
    def read(cls, path: Path) -> GroundTruth:
        """The truth of a file.

        Raises:
            RecordingError: it is no table, or nothing in it is feasible.
        """
        return cls.of(path.stem, Recording.read(path))

    @cached_property
    def best(self) -> float:
        """Tokens/s of the best legal candidate."""
        return float(self.tokens_C.max())

    def single(self, row: int) -> Composition:
        """The table of one candidate."""
        if row not in self._singles:
            self._singles[row] = Composition([self.table.candidates[row]], self.table.model, self.request)
        return self._singles[row]

    def regret(self, candidate: Candidate | None) -> float:
        """Share of the best throughput that a recommendation gives away; 1 for none, or for one that does not fit."""
        if candidate is None or candidate not in self.table.row:
            return 1.0
        return 1.0 - float(self.tokens_C[self.table.row[candidate]]) / self.best

    def is_within_tolerance(self, candidate: Candidate) -> bool:
        """Whether a candidate is within the tolerance of the best, whose probability a confidence states."""
        return self.regret(candidate) <= self.request.tolerance

    def device(self, seed: int, clock: VirtualClock) -> RecordedDevice:
        """The device that answers with recorded runs, drawn with `seed`."""
        return RecordedDevice(self.recording, seed=seed, clock=clock)

    def describe(self) -> dict[str, object]:
        """For the results."""
        errors = np.abs(self.composition_errors)
        return {
            "name": self.name,
            "model": self.model_name,
            "device": self.report.hardware.describe(),
            "num_candidates": len(self.prune.legal.candidates),
            "num_feasible": int((self.tokens_C > 0).sum()),
            "num_within_tolerance": int((self.tokens_C >= (1 - self.request.tolerance) * self.best).sum()),
            "num_components": len(self.table.components),
            "num_whole_models": self.num_whole_models,
            "median_composition_error": float(np.median(errors)) if errors.size else None,
            "exhaustive_seconds": self.exhaustive_seconds,
            "best": self.table.candidates[int(np.argmax(self.tokens_C))].describe(),
            "run_std": run_std(self.recording),
        }


def run_std(recording: Recording) -> float | None:
    """Relative standard deviation between runs of a component, pooled over the table; None with one run of each."""
    squares = []
    for rows in recording.components.values():
        logs = [np.log(row.figures.device_seconds) for row in rows if row.figures and row.figures.device_seconds > 0]
        if len(logs) >= 2:
            squares.append(float(np.var(logs, ddof=1)))
    return float(np.sqrt(np.mean(squares))) if squares else None


def _whole(recording: Recording, table: Composition, candidate: Candidate) -> float | None:
    well = [row.figures for row in recording.whole_models[candidate] if row.figures is not None]
    if not well:
        return None
    tokens = [
        combine_seconds(
            whole.micro_step_seconds,
            whole.optimizer_seconds,
            candidate.micro_batch_size,
            table.model,
            table.request,
        ).tokens_per_second
        for whole in well
    ]
    return float(np.exp(np.mean(np.log(tokens))))


def _mean_cost(recording: Recording, component: Component) -> float:
    rows = recording.components[component]
    return 0.0 if rows[0].inferred else float(np.mean([row.phases.total for row in rows]))
