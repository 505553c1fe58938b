"""The ground truth of a recorded table: the throughput of every candidate, and the cost of trying them all."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.recorded_candidates import Mask, compose, composed_tokens_per_second, fitting_rows
from benchmarks.recording_file import covered_request
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition, Floats
from bexp.explorer.cost.step import combine_seconds
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome, PhaseSeconds, WholeModelMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import PrunedSpace
from bexp.workers.replay.profiler import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import ComponentRow, Recording, RecordingError, WholeModelRow


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


RUN_STD = 0.006
FFN_RUN_STD = 0.02
"""Relative standard deviation between runs of a component: of an FFN, and of any other.

On one H200, 44 components were measured in two or three jobs (benchmarks/results/h200-*.json). They differ by this much
in the median.
"""
HOST_RUN_STD = 0.1
"""The same of the host's time. In benchmarks/results/tables, components with several runs differ by 7 to 15%."""
WHOLE_RUN_STD = 0.003
COMPOSITION_STD = 0.009
"""Relative standard deviation of the error of a composition that is a candidate's own.

In benchmarks/results/h200-recorded-fidelity.json, candidates that are limited by the device scatter by 0.8 to 1.0%.
"""
FFNS = frozenset({ComponentKind.DENSE_FFN, ComponentKind.MOE_FFN})


@dataclass(frozen=True)
class DrawnTruth(GroundTruth):
    """The truth of one seed."""

    seed: int = 0

    @classmethod
    def draw(cls, truth: GroundTruth, seed: int) -> DrawnTruth:
        """Draw the truth of a seed. Candidates that were timed whole, or do not fit, stay as they are."""
        timed = [truth.table.row[c] for c in truth.recording.whole_models if c in truth.table.row]
        error_C = np.exp(COMPOSITION_STD * np.random.default_rng([seed, 1]).standard_normal(len(truth.tokens_C)))
        error_C[timed] = 1.0
        known = {field.name: getattr(truth, field.name) for field in fields(GroundTruth)}
        return cls(**(known | {"tokens_C": truth.tokens_C * error_C}), seed=seed)

    def device(self, seed: int, clock: VirtualClock) -> RecordedDevice:
        """The device whose runs scatter around the truth."""
        return DrawnDevice(self, seed, clock)


class DrawnDevice(RecordedDevice):
    """Answers with the truth of a table and the noise between runs. Memory and failures are those of recorded runs."""

    def __init__(self, truth: DrawnTruth, seed: int, clock: VirtualClock) -> None:
        super().__init__(truth.recording, seed=seed, clock=clock)
        self._truth = truth
        figures = compose(truth.recording, truth.table)
        self._device_K: Floats = figures.device_seconds
        self._host_K: Floats = figures.host_seconds
        self._optimizer_C = truth.table.optimizer_seconds(self._device_K[None, :], self._host_K)[0]
        self._peak_C = truth.table.static_bytes_C + np.add(*truth.table.activation_bytes(*figures.sizes))

    def draw(self, component: Component, again: int | None = None) -> ComponentRow | None:
        """Draw a run of a component around its mean; `again` is the trial that measures it once more."""
        row = super().draw(component, again)
        if row is None or row.figures is None:
            return row
        rng = np.random.default_rng([self._seed, zlib.crc32(component.key.encode()), 2, again or 0])
        column = self._truth.table.column[component]
        std = FFN_RUN_STD if component.kind in FFNS else RUN_STD
        device = float(self._device_K[column]) * math.exp(std * float(rng.standard_normal()))
        host = float(self._host_K[column]) * math.exp(HOST_RUN_STD * float(rng.standard_normal()))
        figures = row.figures
        moved = {
            "device_seconds": device,
            "forward_device_seconds": figures.forward_device_seconds * device / figures.device_seconds,
            "host_seconds": device if figures.host_seconds == figures.device_seconds else host,
        }
        return row.model_copy(update={"figures": figures.model_copy(update=moved)})

    def _draw_whole_model(self, candidate: Candidate) -> WholeModelRow | None:
        truth, rows = self._truth, self.recording.whole_models.get(candidate, [])
        row = truth.table.row.get(candidate)
        if row is None or (rows and all(r.figures is None for r in rows)):
            return super()._draw_whole_model(candidate)
        if truth.tokens_C[row] <= 0.0:
            return WholeModelRow(candidate=candidate, run=0, outcome=Outcome.OUT_OF_MEMORY, reason="does not fit")
        rng = np.random.default_rng([self._seed, zlib.crc32(candidate.describe().encode()), 3])
        share, optimizer = truth.request.devices.batch_share, float(self._optimizer_C[row])
        step = share * truth.table.model.seq_length / float(truth.tokens_C[row])
        micro_step = (step - optimizer) * candidate.micro_batch_size / share
        micro_step *= math.exp(WHOLE_RUN_STD * float(rng.standard_normal()))
        peak = round(float(self._peak_C[row]))
        return WholeModelRow(
            candidate=candidate,
            run=0,
            figures=WholeModelMeasurement(
                micro_step_seconds=micro_step,
                optimizer_seconds=optimizer,
                standard_error_seconds=WHOLE_RUN_STD / 2 * micro_step,
                peak_bytes=peak,
                reserved_bytes=peak,
                repeats=5,
            ),
            phases=rows[0].phases if rows else PhaseSeconds(build=1.0, warm_up=2 * micro_step, timed=6 * micro_step),
        )
