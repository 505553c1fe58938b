"""The state of the search of one model variant: its knowledge, and the candidate that it would recommend."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from optuna.study import Study

from bexp.explorer.cost_model.candidate_table import Floats, Ints, Mask, SpaceTable
from bexp.explorer.cost_model.components import Component
from bexp.explorer.cost_model.step import StepBytes, StepSeconds, memory_limit
from bexp.explorer.records.earlier_runs import EarlierRuns, ReusedComponents
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, ComponentMeasurement, Measurement, Outcome
from bexp.explorer.search.candidate_memory import CandidateMemory, MemoryErrors
from bexp.explorer.search.candidate_posterior import (
    CandidatePosterior,
    compute_posterior,
    find_contenders,
    missing_components,
    wanted_components,
)
from bexp.explorer.search.candidate_throughput import NUM_SAMPLES, CandidateThroughput
from bexp.explorer.search.earlier_check import ComponentReuse, choose_check
from bexp.explorer.search.feasibility import Failures
from bexp.explorer.search.optuna_trials import read_measurement
from bexp.explorer.search.preference import recommended_position
from bexp.explorer.search.reported_runs import peak_factor
from bexp.explorer.search.suggestion import Suggestion
from bexp.explorer.search.whole_model_runs import WholeModelRuns
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.hardware import HardwareSpec
from bexp.explorer.spec.reported_run import ReportedRun
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.surrogate.ageing import age_run
from bexp.explorer.surrogate.gaussian_process import Surrogate
from bexp.explorer.surrogate.observations import ObservationLog
from bexp.explorer.surrogate.whole_model_error import CompositionErrors, ReportedError

LEAST_SHARE = 0.97
"""A candidate that cannot reach this share of the best known throughput cannot change the answer.

The room below 1 is for composition errors. It grows as they are found to be larger.
"""
FIRST = 0
"""The number of a trial that has none."""
SOUND = frozenset({Outcome.OK, Outcome.CONTAMINATED})
"""Outcomes of a trial that ran to its end."""


@dataclass(frozen=True, slots=True)
class BestCandidate:
    """The row of the candidate to recommend, and the confidence in it: a probability, 0..1."""

    row: int
    confidence: float


class SearchState:
    """Everything that is known about one model variant: measurements, failures, and the posterior of the rest.

    It depends on the seed and the set of trials, not on their order, so a resumed exploration goes the way it would
    have gone. `legal` marks the rows of the table that may be recommended; other rows (a base outside the space) are
    only predicted. `memory` holds the bytes of all rows, `whole_models` the whole models that were timed. `reported`
    real runs of candidates in the table show the composition's error. If they needed more memory than composed,
    `limit_bytes` is lower by as much. `earlier` runs of components are observations with a wider error; `reuse` says
    how they are checked, and is null if there are none in the table.
    """

    def __init__(
        self,
        table: SpaceTable,
        legal: Collection[Candidate],
        request: ExplorationRequest,
        hardware: HardwareSpec,
        reported: Sequence[ReportedRun] = (),
        earlier: EarlierRuns | None = None,
    ) -> None:
        self.table = table
        self.request = request
        self.hardware = hardware
        self.reported = tuple(run for run in reported if run.candidate in table.row)
        self.limit_bytes = math.floor(memory_limit(request, hardware) / peak_factor(self.reported))
        legal_set = set(legal)
        self._legal_C: Mask = np.array([c in legal_set for c in table.candidates], dtype=np.bool_)
        rng = np.random.default_rng(request.seed)
        self.surrogate = Surrogate(table, hardware, num_samples=NUM_SAMPLES, rng=rng)
        self._errors = CompositionErrors(table.candidates, hardware.device_kind, request.seed, NUM_SAMPLES, rng)
        self._reported_errors = [ReportedError(table.row[run.candidate], run.log_error) for run in self.reported]
        self._memory_errors = MemoryErrors(len(table.candidates), NUM_SAMPLES, rng)
        self.whole_models = WholeModelRuns()
        usable = [] if earlier is None else [run for run in earlier.runs if run.measurement.component in table.column]
        self._log = ObservationLog([age_run(run, hardware.device_kind) for run in usable])
        self._failures = Failures()
        self._learnt: set[int] = set()
        self._pending: dict[int, Suggestion] = {}
        self._expected: frozenset[Component] = frozenset()
        self._expecting: SearchState | None = None
        self._update(bool(usable), refresh=True)
        self.reuse = self._begin_reuse(earlier) if earlier is not None and usable else None

    # -- learning ------------------------------------------------------------------------------------------------

    def learn_study(self, study: Study) -> None:
        """Learn the measured trials of a study, each once: a trial that was learnt before is not read again."""
        trials = [t for t in study.get_trials(deepcopy=False) if t.number not in self._learnt]
        measured = {t.number: found for t in trials if (found := read_measurement(t)) is not None}
        self._learnt.update(measured)
        self.learn_trials(measured.values())

    def learn(self, measurements: Iterable[Measurement]) -> None:
        """Learn measurements that belong to no trial; of each component the first result alone."""
        self.learn_trials((FIRST, measurement) for measurement in measurements)

    def learn_trials(self, trials: Iterable[tuple[int, Measurement]]) -> None:
        """Learn numbered trials; a component counts once a trial."""
        measured, before = False, self._num_troubles()
        for number, measurement in trials:
            if self._pending.pop(number, None) is not None:
                self._expecting = None
            measured = self._log.add(number, measurement.components) or measured
            self._failures.learn(measurement)
            measured = self._judge_reuse(failed=measurement.outcome not in SOUND) or measured
        self._update(measured, refresh=before != self._num_troubles())

    def learn_shared(self, found: Iterable[tuple[int, Sequence[ComponentMeasurement]]]) -> None:
        """Learn, by trial, the components that another variant has measured and that this one has in common."""
        measured, before = False, self._num_troubles()
        for number, components in found:
            shared = [m for m in components if m.component in self.table.column]
            measured = self._log.add(number, shared) or measured
        measured = self._judge_reuse(failed=False) or measured
        self._update(measured, refresh=before != self._num_troubles())

    def learn_whole_model(
        self,
        candidate: Candidate,
        tokens_per_second: float,
        standard_error: float,
        peak_bytes: int | None = None,
        number: int = FIRST,
    ) -> None:
        """Learn a whole model's throughput, with its relative standard error, and its peak: both correct the others.

        Runs of one candidate by several trials count together; `number` is the trial's.
        """
        row = self.table.row[candidate]
        if self.whole_models.learn(row, number, (tokens_per_second, standard_error), peak_bytes):
            self._refresh()

    def reject(self, candidate: Candidate, reason: str, *, too_large: bool = False) -> None:
        """Rule `candidate` out. If it was `too_large`, others that need as many bytes are less likely to fit."""
        self._failures.reject(candidate, reason, too_large=too_large)
        self._refresh()

    def expect(self, number: int, suggestion: Suggestion) -> None:
        """Trial `number` is in flight until it is learnt; what it measures is not suggested meanwhile."""
        self._pending[number] = suggestion
        self._expecting = None

    def expecting_pending(self) -> SearchState:
        """The state in which every trial in flight has measured what is expected of it; this one if there is none."""
        if not self._pending:
            return self
        if self._expecting is None:
            other = copy.copy(self)
            pending = [c for number in sorted(self._pending) for c in self._pending[number].components]
            other._pending, other._expected = {}, frozenset(pending)
            other.surrogate = self.surrogate.expecting(pending)
            other._refresh()
            self._expecting = other
        return self._expecting

    # -- what is known of a candidate ----------------------------------------------------------------------------

    @property
    def measured(self) -> dict[Component, ComponentMeasurement]:
        """The first run of every component that was measured."""
        return {component: runs.first for component, runs in self._log.runs.items()}

    def is_known(self, row: int) -> bool:
        """Whether every component of a candidate is measured."""
        return bool(self._known_C[row])

    def fits(self, row: int) -> bool:
        """Whether a candidate is expected to fit: by its measured components, and by predictions of the others."""
        return bool(self.memory.fits_C[row])

    @property
    def smallest_row(self) -> int:
        """The legal row that is expected to need least memory."""
        return int(np.argmin(np.where(self._legal_C, self.memory.required_C, np.inf)))

    def is_open(self, row: int) -> bool:
        """Whether a candidate was neither rejected nor uses a component that failed."""
        return bool(self._open_C[row])

    def wanted(self, row: int) -> tuple[Component, ...]:
        """The components of a candidate that are neither measured nor predicted well enough."""
        wanted_P = wanted_components(self.table, self.surrogate, np.array([row]))[0]
        return tuple(self.table.components[column] for column in self.table.columns_CP[row][wanted_P])

    def missing(self, row: int) -> tuple[Component, ...]:
        """The components of a candidate that are not measured, in the order of a step."""
        return self.table.missing(row, self.surrogate.known_K)

    def count_attempts(self, component: Component) -> int:
        """How often a component was run; one that is expected from a trial in flight counts as run often enough."""
        return sys.maxsize if component in self._expected else self._log.count_attempts(component)

    def seconds(self, row: int) -> StepSeconds:
        """Expected seconds of a candidate's step, as its components compose it."""
        return self._throughput.seconds(row, self.request)

    def corrected_seconds(self, row: int) -> StepSeconds:
        """Expected seconds of a candidate's step, corrected by the whole models that were run."""
        return self._throughput.corrected_seconds(row, self.request)

    def bytes(self, row: int) -> StepBytes:
        """Expected bytes of a candidate's step, from measured components where there are any."""
        return self.memory.expected_bytes(row)

    def known_rows(self) -> Ints:
        """Legal rows that are open, expected to fit, and measured in full."""
        return np.flatnonzero(self._legal_C & self._open_C & self._known_C & self.memory.fits_C)

    def open_rows(self) -> Ints:
        """Legal rows that are open."""
        return np.flatnonzero(self._legal_C & self._open_C)

    def mean_tokens_per_second(self) -> Floats:
        """Expected tokens/s of every candidate, shape (C,), whole models taken into account."""
        return self._throughput.mean_C

    # -- decisions -----------------------------------------------------------------------------------------------

    def recommend(self) -> BestCandidate | None:
        """The candidate to recommend, among those known well enough; null if there is none."""
        best = self._recommended_position()
        if best is None:
            return None
        return BestCandidate(int(self.posterior.rows[best]), self.posterior.confidence(best, self.request.tolerance))

    @property
    def search_confidence(self) -> float | None:
        """The confidence that ends the search, 0..1: in the fastest candidate, also if another one is preferred.

        It leaves out what no component tells, whether candidates near the limit run.
        """
        fastest = self.posterior.incumbent
        return None if fastest is None else self.posterior.confidence_if_it_runs(fastest, self.request.tolerance)

    def posterior_of(self, rows: Ints) -> CandidatePosterior:
        """The posterior of those of `rows` that may still be the best of them."""
        known = np.intersect1d(rows, self.known_rows())
        room = (1.0 - LEAST_SHARE) * self._throughput.scale
        if self.request.prefer == "memory":  # whatever is within the tolerance may be recommended
            room += self.request.tolerance
        best = float(self._throughput.mean_C[known].max()) if known.size else 0.0
        least_A = max(0.0, 1.0 - room) * best / np.exp(self._throughput.shift_C[rows])
        return compute_posterior(
            self.table,
            self.surrogate,
            self._throughput,
            self.memory,
            find_contenders(self.table, self.surrogate, rows, least_A),
            self._memory_errors,
            self.whole_models.found.keys(),
        )

    def to_repeat(self, measurement: Measurement) -> Suggestion | None:
        """Return what to repeat after a contaminated measurement; null if nothing, or after too many attempts."""
        row = self.table.row.get(measurement.candidate)
        if row is None or measurement.outcome is not Outcome.CONTAMINATED:
            return None
        contaminated = (m.component for m in measurement.components if m.contamination is not None)
        left = tuple(c for c in contaminated if self._log.count_contaminated(c) < CONTAMINATED_ATTEMPTS)
        if not left:
            return None
        return Suggestion(
            row, left, again=all(self._log.count(c) for c in left), reason="the last run was contaminated"
        )

    @property
    def reused(self) -> ReusedComponents | None:
        """What is known from earlier explorations alone; null if that is nothing."""
        return None if self.reuse is None else self.reuse.describe(len(self._log.earlier))

    # -- internals -----------------------------------------------------------------------------------------------

    def _recommended_position(self) -> int | None:
        return recommended_position(self.posterior, self.memory.required_C, self.request)

    def _begin_reuse(self, earlier: EarlierRuns) -> ComponentReuse | None:
        """Choose how earlier components are checked; forget them if that is not worth it. Nothing else is known yet."""
        rows = np.flatnonzero(self._legal_C & self._open_C & self.memory.fits_C)
        position = self._recommended_position()
        preferred = None if position is None else int(self.posterior.rows[position])
        found = self._log.earlier
        check = choose_check(self.table, self.surrogate, found, rows, preferred)
        if check is not None:
            return ComponentReuse(earlier, check, len(found))
        self._log.drop_earlier()
        self._update(True)
        return None

    def _judge_reuse(self, *, failed: bool) -> bool:
        """Decide whether earlier components are reused, once that is possible; returns whether they are dropped."""
        if self.reuse is None or self.reuse.is_decided:
            return False
        self.reuse.judge(self._log, failed=failed)
        if self.reuse.is_dropped:
            self._log.drop_earlier()
        return self.reuse.is_dropped

    def _num_troubles(self) -> tuple[int, int]:
        return len(self._failures), self._log.num_contaminated

    def _update(self, measured: bool, *, refresh: bool = False) -> None:
        if measured:
            self.surrogate.fit(self._log.runs)
        if measured or refresh:
            self._refresh()

    def _refresh(self) -> None:
        """Compute everything that follows from the surrogate, the failures and the whole models."""
        table, surrogate = self.table, self.surrogate
        self._expecting = None
        self._throughput = CandidateThroughput(
            table, surrogate, self._errors, self.whole_models.found, self._reported_errors
        )
        too_large = self._failures.too_large(table)
        self.memory = CandidateMemory(
            table, surrogate, self.hardware, self.limit_bytes, self.whole_models.peaks, too_large
        )
        missing_CP = missing_components(table, surrogate, np.arange(len(table.candidates)))
        self._known_C: Mask = np.logical_not(missing_CP.any(axis=1))
        sound_C = ~self._failures.failing(table, self._log)
        rejected_C = self._failures.rejected(table, self.memory.required_C, self.memory.explained)
        self._open_C: Mask = np.asarray(~rejected_C & sound_C)
        self.posterior = self.posterior_of(self.open_rows())
