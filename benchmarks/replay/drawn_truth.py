"""A recorded table as a distribution: each seed draws a truth, and a device whose runs scatter around that truth.

A recorded run is one draw of what a component takes. Most components of the tables were run once, so a replay of
recorded runs scatters by their stated standard error, which is several times less than runs differ by. Here the mean of
the recorded runs is the truth of a component, and no run shows it. The truth of a whole model is its recorded mean
where it was timed. Elsewhere it is composed of the components' means, and a composition error is drawn for it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.recorded_candidates import compose
from benchmarks.replay.ground_truth import GroundTruth
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Floats
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import Outcome, PhaseSeconds, WholeModelMeasurement
from bexp.workers.replay.profiler import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import ComponentRow, WholeModelRow

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
