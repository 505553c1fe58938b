"""One strategy's view of a recorded device: it tries candidates, and is charged for components that are new to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.recorded_candidates import arrays_of, composed_tokens_per_second
from benchmarks.replay.ground_truth import GroundTruth
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import required_table
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import ComponentMeasurement, Outcome
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.workers.replay.profiler import VirtualClock


@dataclass(frozen=True, slots=True)
class Try:
    """A candidate that was tried, and when: its composed tokens/s are None if it failed or is too large."""

    row: int | None
    tokens_per_second: float | None
    at_seconds: float


class TrialBench:
    """Tries candidates one after another. Equal components of different candidates are measured once."""

    def __init__(self, truth: GroundTruth, seed: int) -> None:
        self.truth = truth
        self.clock = VirtualClock()
        self.device = truth.device(seed, self.clock)
        self.tries: list[Try] = []
        self._measured: dict[Component, ComponentMeasurement] = {}
        self._failed: set[Component] = set()
        self._limit = memory_limit(truth.request, truth.report.hardware)

    @property
    def num_out_of_memory(self) -> int:
        """Tries that did not fit, or failed."""
        return sum(t.tokens_per_second is None for t in self.tries)

    def row(self, candidate: Candidate) -> int | None:
        """The row of a legal candidate that may fit; None for any other."""
        row = self.truth.table.row.get(candidate)
        return row if row is not None and self.truth.legal_C[row] else None

    def refuse(self) -> None:
        """Count a try that would have run out of memory by prediction. It costs no seconds here."""
        self.tries.append(Try(None, None, self.clock()))

    def run(self, row: int) -> float | None:
        """Try a candidate: its tokens/s, or None."""
        table = self.truth.table
        missing = tuple(c for c in table.decompositions[row].components if c not in self._measured)
        failed = any(c in self._failed for c in missing)
        if missing and not failed:
            task = TrialTask(
                number=len(self.tries),
                kind=TrialKind.COMPONENTS,
                model=table.model,
                candidate=table.candidates[row],
                components=missing,
                timeout_seconds=self.truth.request.budget.trial_timeout_seconds,
            )
            measurement = self.device(task)
            self._measured |= {m.component: m for m in measurement.components}
            if measurement.outcome is not Outcome.OK:
                failed = True
                if measurement.failed_component is not None:
                    self._failed.add(measurement.failed_component)
        tokens = None if failed else self._compose(row)
        self.tries.append(Try(row, tokens, self.clock()))
        return tokens

    def fastest(self) -> Candidate | None:
        """The fastest candidate that was tried and fits."""
        well = [(t.tokens_per_second, t.row) for t in self.tries if t.tokens_per_second is not None]
        _, row = max(well, key=lambda pair: pair[0], default=(0.0, None))
        return None if row is None else self.truth.table.candidates[row]

    def _compose(self, row: int) -> float | None:
        """Tokens/s of a candidate from its measured components, as the product composes them; None if too large."""
        table = self.truth.single(row)
        hardware = self.truth.report.hardware
        figures = arrays_of(table, self._measured, host_is_device=hardware.device_kind == "cpu")
        activations = np.add(*table.activation_bytes(*figures.sizes))
        if required_table(table, activations, hardware)[0] > self._limit:
            return None
        return float(composed_tokens_per_second(table, figures)[0])
