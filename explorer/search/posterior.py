"""Conclusions from the knowledge: seconds, bytes and throughput of every candidate, and which to recommend."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, Floats, Ints, Mask
from bexp.explorer.cost.peak_memory import PeakMemory, peak_memory
from bexp.explorer.cost.step import StepBytes, StepSeconds, memory_limit
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import EarlierRuns
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.records.run_report import ReportedRun
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.candidate_memory import CandidateMemory, MemoryErrors
from bexp.explorer.search.candidate_throughput import NUM_SAMPLES, CandidateThroughput
from bexp.explorer.search.compilation import Compilation
from bexp.explorer.search.confidence import (
    Contenders,
    compute_contenders,
    find_contenders,
    missing_components,
    wanted_components,
)
from bexp.explorer.search.earlier_check import choose_check
from bexp.explorer.search.knowledge import Knowledge
from bexp.explorer.search.reported_runs import peak_factor
from bexp.explorer.search.suggestion import measuring_seconds, whole_model_seconds
from bexp.explorer.surrogate.gaussian_process import Surrogate
from bexp.explorer.surrogate.whole_model_error import CompositionErrors, ReportedError, WholeModelRuns

LEAST_SHARE = 0.97
"""A candidate that cannot reach this share of the best known throughput cannot change the answer.

The room below 1 is for composition errors. It grows as larger ones are seen.
"""


@dataclass(frozen=True, slots=True)
class BestCandidate:
    """The row of the candidate to recommend, and the confidence in it: a probability, 0..1."""

    row: int
    confidence: float


@dataclass(frozen=True, slots=True)
class _Derived:
    """Values computed from a version of the knowledge, and from what is expected of trials in flight."""

    version: int
    surrogate: Surrogate
    throughput: CandidateThroughput
    memory: CandidateMemory
    compilation: Compilation
    known_C: Mask  # noqa: N815 - axes are in names
    open_C: Mask  # noqa: N815 - axes are in names


class Posterior:
    """The seconds, bytes and throughput of every candidate, measured or not. They are computed when they are asked for.

    They depend on the seed and the set of trials, not on their order, so a resumed exploration goes the way it would
    have gone. Candidates of the table that are not `legal` (a base outside the space) are only predicted.
    """

    def __init__(
        self,
        table: Composition,
        legal: Collection[Candidate],
        request: ExplorationRequest,
        hardware: HardwareSpec,
        reported: Sequence[ReportedRun] = (),
        earlier: EarlierRuns | None = None,
    ) -> None:
        legal_set, rng = set(legal), np.random.default_rng(request.seed)
        self.knowledge = knowledge = Knowledge(table, hardware.device_kind, reported, earlier)
        self.table = table
        self.is_whole = table.candidates[0].is_whole
        self.request = request
        self.hardware = hardware
        self.limit_bytes = math.floor(memory_limit(request, hardware) / peak_factor(knowledge.reported))
        """Below the memory limit by the factor by which real runs needed more than composed."""
        self._legal_C: Mask = np.array([c in legal_set for c in table.candidates], dtype=np.bool_)
        self._surrogate = Surrogate(table, hardware, num_samples=NUM_SAMPLES, rng=rng)
        self._errors = CompositionErrors(table.candidates, hardware.device_kind, request.seed, NUM_SAMPLES, rng)
        self._reported = [ReportedError(table.row[run.candidate], run.log_error) for run in knowledge.reported]
        self._memory_errors = MemoryErrors(len(table.candidates), NUM_SAMPLES, rng)
        self._fitted = 0
        self._derived: _Derived | None = None
        self._contenders: Contenders | None = None
        self._expected: frozenset[Component] = frozenset()
        if knowledge.log.earlier:
            rows = np.flatnonzero(self._legal_C & self._now.open_C & self.memory.fits_C)
            best = self.recommended_position
            preferred = None if best is None else int(self.contenders.rows[best])
            knowledge.begin_reuse(choose_check(table, self.surrogate, knowledge.log.earlier, rows, preferred))

    @property
    def surrogate(self) -> Surrogate:
        """Seconds and bytes of the components."""
        return self._now.surrogate

    @property
    def memory(self) -> CandidateMemory:
        """Bytes of all rows."""
        return self._now.memory

    @property
    def compilation(self) -> Compilation:
        """The seconds that the compiler takes in a run."""
        return self._now.compilation

    @property
    def contenders(self) -> Contenders:
        """The open candidates that may still be the best."""
        now = self._now
        if self._contenders is None:
            self._contenders = self.contenders_among(np.flatnonzero(self._legal_C & now.open_C))
        return self._contenders

    def expecting_pending(self) -> Posterior:
        """The posterior if every trial in flight had measured what is expected of it; this one if there is none."""
        pending = [c for number in sorted(self.knowledge.pending) for c in self.knowledge.pending[number].components]
        if not self.knowledge.pending:
            return self
        other = copy.copy(self)
        other._expected, other._contenders = frozenset(pending), None
        other._derived = self._derive(self.surrogate.expecting(pending))
        return other

    def among(self, rows_C: Mask) -> Posterior:
        """The posterior as it is now, of the search that would recommend nothing but `rows_C`, shape (C,)."""
        self.contenders  # noqa: B018 - computes what the copy shares
        other = copy.copy(self)
        other._legal_C, other._contenders = self._legal_C & rows_C, None
        return other

    @property
    def measuring_seconds_K(self) -> Floats:  # noqa: N802 - axes are in names
        """Seconds that it takes to measure each component, shape (K,)."""
        return measuring_seconds(self.surrogate.device_mean_K) + self.preparing_seconds_K

    @property
    def preparing_seconds_K(self) -> Floats:  # noqa: N802 - axes are in names
        """Seconds of these that the compiler takes, or the start of a command, shape (K,)."""
        prepared_K = ~self.surrogate.essential_K if self.is_whole else self.surrogate.compiled_K
        return self.knowledge.preparing.of(prepared_K, self.surrogate.known_K)

    def whole_model_seconds(self, row: int) -> float:
        """Seconds that it takes to run the whole model of a candidate."""
        seconds = whole_model_seconds(self.corrected_seconds(row).micro_step, self.hardware.device_kind)
        columns = self.table.columns_CP[row][self.table.used_CP[row]]
        return seconds + float(self.preparing_seconds_K[columns].sum())

    def is_known(self, row: int) -> bool:
        """Whether every component of a candidate is measured."""
        return bool(self._now.known_C[row])

    def fits(self, row: int) -> bool:
        """Whether a candidate is expected to fit: by its measured components, and by predictions of the others."""
        return bool(self.memory.fits_C[row])

    def is_open(self, row: int) -> bool:
        """Whether a candidate was neither rejected nor uses a component that failed."""
        return bool(self._now.open_C[row])

    def wanted(self, row: int) -> tuple[Component, ...]:
        """The components of a candidate that are neither measured nor predicted well enough."""
        wanted_P = wanted_components(self.table, self.surrogate, np.array([row]))[0]
        return tuple(self.table.components[column] for column in self.table.columns_CP[row][wanted_P])

    def missing(self, row: int) -> tuple[Component, ...]:
        """The components of a candidate that are not measured, in the order of a step."""
        return self.table.missing(row, self.surrogate.known_K)

    def count_attempts(self, component: Component) -> int:
        """Return how often a component was run; often enough if a trial in flight is to measure it."""
        return sys.maxsize if component in self._expected else self.knowledge.log.count_attempts(component)

    def runs_of(self, row: int) -> list[ComponentMeasurement]:
        """Return the runs of a candidate's components."""
        columns = self.table.columns_CP[row][self.table.used_CP[row]]
        observed = [self.knowledge.log.runs.get(self.table.components[column]) for column in columns]
        return [run for each in observed if each is not None for run in each.runs]

    def seconds(self, row: int) -> StepSeconds:
        """Expected seconds of a candidate's step, as its components compose it."""
        return self._now.throughput.seconds(row, self.request)

    def corrected_seconds(self, row: int) -> StepSeconds:
        """Expected seconds of a candidate's step, corrected by the whole models that were run."""
        return self._now.throughput.corrected_seconds(row, self.request)

    def bytes(self, row: int) -> StepBytes:
        """Expected bytes of a candidate's step, from measured components where there are any."""
        return self.memory.expected_bytes(row)

    def peak_memory(self, row: int) -> PeakMemory:
        """Return what fills a candidate's memory at its peak, from measured components where there are any."""
        return peak_memory(self.table, row, self.surrogate.bytes_3K)

    def mean_tokens_per_second(self) -> Floats:
        """Expected tokens/s of every candidate, shape (C,), whole models taken into account."""
        return self._now.throughput.mean_C

    def known_rows(self) -> Ints:
        """Legal rows that are open, expected to fit, and measured in full."""
        return np.flatnonzero(self._legal_C & self._now.open_C & self._now.known_C & self.memory.fits_C)

    def open_rows(self) -> Ints:
        """Legal rows that are open."""
        return np.flatnonzero(self._legal_C & self._now.open_C)

    @property
    def smallest_row(self) -> int:
        """The legal row that is expected to need least memory."""
        return int(np.argmin(np.where(self._legal_C, self.memory.required_C, np.inf)))

    def recommend(self) -> BestCandidate | None:
        """The candidate to recommend, among those known well enough; None if there is none."""
        best = self.recommended_position
        if best is None:
            return None
        return BestCandidate(int(self.contenders.rows[best]), self.contenders.confidence(best, self.request.tolerance))

    @property
    def recommended_position(self) -> int | None:
        """The position, among the contenders, of the candidate to recommend; None if none is known well enough.

        It is the one with the highest expected throughput, unless whole models contradict that. If memory is preferred,
        it is the one with the smallest peak among those that are expected to be within the tolerance of it.
        """
        contenders, tolerance = self.contenders, self.request.tolerance
        fastest = contenders.incumbent
        if fastest is None:
            return None
        if self.request.prefer == "speed":
            return fastest_whole(contenders, fastest, self.knowledge.whole_models, tolerance)
        clear = np.flatnonzero(contenders.clear_A)
        return smallest_position(contenders, clear, fastest, self.memory.required_C, tolerance)

    @property
    def search_confidence(self) -> float | None:
        """The confidence that ends the search, 0..1: in the fastest candidate, also if another one is preferred.

        It leaves out what no component tells, whether candidates near the limit run.
        """
        fastest = self.contenders.incumbent
        return None if fastest is None else self.contenders.confidence_if_it_runs(fastest, self.request.tolerance)

    def contenders_among(self, rows: Ints) -> Contenders:
        """Those of `rows` that may still be the best of them."""
        throughput = self._now.throughput
        known = np.intersect1d(rows, self.known_rows())
        room = (1.0 - LEAST_SHARE) * throughput.scale
        if self.request.prefer == "memory":  # whatever is within the tolerance may be recommended
            room += self.request.tolerance
        over_run = self.compilation.over_run
        best = float(over_run(throughput.mean_C[known], known).max()) if known.size else 0.0
        least_A = max(0.0, 1.0 - room) * best / np.exp(throughput.shift_C[rows])
        contenders = compute_contenders(
            self.table,
            self.surrogate,
            throughput,
            self.memory,
            find_contenders(self.table, self.surrogate, rows, least_A),
            self._memory_errors,
            np.flatnonzero(self._now.known_C).tolist() if self.is_whole else self.knowledge.whole_models.by_row.keys(),
        )
        return replace(
            contenders,
            mean_A=over_run(contenders.mean_A, contenders.rows),
            composed_NA=over_run(contenders.composed_NA, contenders.rows),
            tokens_NA=over_run(contenders.tokens_NA, contenders.rows),
        )

    @property
    def _now(self) -> _Derived:
        if self._derived is None or self._derived.version != self.knowledge.version:
            if self._fitted != self.knowledge.log.version:
                self._surrogate.fit(self.knowledge.log.runs)
                self._fitted = self.knowledge.log.version
            self._derived, self._contenders = self._derive(self._surrogate), None
        return self._derived

    def _derive(self, surrogate: Surrogate) -> _Derived:
        """Compute everything that follows from a surrogate, the failures and the whole models."""
        table, knowledge = self.table, self.knowledge
        throughput = CandidateThroughput(table, surrogate, self._errors, knowledge.whole_models.by_row, self._reported)
        memory = CandidateMemory(
            table,
            surrogate,
            self.hardware,
            self.limit_bytes,
            knowledge.whole_models.peaks,
            knowledge.failures.too_large(table),
        )
        missing_CP = missing_components(table, surrogate, np.arange(len(table.candidates)))
        rejected_C = knowledge.failures.rejected(
            table, memory.required_C, memory.explained, knowledge.whole_models.by_row
        )
        return _Derived(
            version=knowledge.version,
            surrogate=surrogate,
            throughput=throughput,
            memory=memory,
            compilation=Compilation(table, knowledge.log.runs, knowledge.preparing.measured),
            known_C=np.logical_not(missing_CP.any(axis=1)),
            open_C=~(rejected_C | knowledge.failures.failing(table, knowledge.log)),
        )


def fastest_whole(contenders: Contenders, position: int, whole_models: WholeModelRuns, tolerance: float) -> int:
    """Return `position`, unless another clear contender ran faster as a whole model by more than the tolerance.

    Both must have been run whole. The fastest of those that were is then returned. On a noisy device the posterior may
    take a whole model for a matter of luck. But nobody would believe an answer that its own figures contradict.
    """
    reached = {
        int(i): speed
        for i in np.flatnonzero(contenders.clear_A)
        if (speed := whole_models.tokens_per_second(int(contenders.rows[i]))) is not None
    }
    if position not in reached:
        return position
    fastest = max(reached, key=lambda i: reached[i])
    return fastest if (1.0 - tolerance) * reached[fastest] > reached[position] else position


def smallest_position(contenders: Contenders, eligible: Ints, fastest: int, required_C: Floats, loss: float) -> int:
    """Return the position of the smallest peak among the `eligible` that are hardly slower than the `fastest`.

    They may fall short by a share `loss` of the expected tokens/s of the fastest; 0 gives the fastest itself, or an
    equal one.
    """
    near = eligible[contenders.mean_A[eligible] >= (1.0 - loss) * contenders.mean_A[fastest]]
    return int(min(near, key=lambda i: (required_C[contenders.rows[i]], -contenders.mean_A[i])))
