"""What an exploration knows, and what it would recommend."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from explorer.cost_model.candidate_table import Floats, Ints, Mask, SpaceTable, required_table
from explorer.cost_model.components import Component
from explorer.cost_model.step import StepBytes, StepSeconds, combine_seconds, memory_limit, required_bytes
from explorer.records.measurement import CONTAMINATED_ATTEMPTS, ComponentMeasurement, Measurement, Outcome
from explorer.search.acquisition import MOST_RUNS, Suggestion, suggest_measurement
from explorer.search.candidate_posterior import CandidatePosterior, contenders, missing_components, wanted_components
from explorer.search.feasibility import Failures
from explorer.spec.candidate import Candidate
from explorer.spec.hardware import HardwareSpec
from explorer.spec.request import ExplorationRequest
from explorer.surrogate.gaussian_process import Surrogate
from explorer.surrogate.observations import ObservationLog
from explorer.surrogate.whole_model_error import CompositionErrors, Correction, WholeModelRun

NUM_SAMPLES = 256
FEWEST_SAMPLES = 64
MOST_DRAWS = 2**20  # samples times contenders: with many contenders, while little is known, fewer samples do
SURE = 4.0  # standard deviations of the predicted bytes beyond which no sample lies
LEAST_SHARE = 0.97
"""Of the best that is known: a candidate that cannot reach it does not decide anything.

What is missing to 1 leaves room for errors of composition, and grows as they do.
"""
MATTERS = 0.25  # of the tolerance: a smaller gain is not worth running a whole model
FIRST = 0  # a trial without a number


@dataclass(frozen=True, slots=True)
class Verdict:
    """The candidate to recommend, and the probability that it is within tolerance of the best, 0..1."""

    row: int
    probability: float


class SearchState:
    """Knowledge about one model variant: measured components, failed ones, and the posterior over the rest.

    It depends on the seed and the set of trials alone, not on their order, so that a resumed exploration goes the way
    it would have gone. `legal` marks the rows of the table that may be recommended; other rows (a base outside the
    space) are only predicted.
    """

    def __init__(
        self,
        table: SpaceTable,
        legal: Collection[Candidate],
        request: ExplorationRequest,
        hardware: HardwareSpec,
    ) -> None:
        self.table = table
        self.request = request
        self.hardware = hardware
        self.limit_bytes = memory_limit(request, hardware)
        legal_set = set(legal)
        self._legal_C: Mask = np.array([c in legal_set for c in table.candidates], dtype=np.bool_)
        rng = np.random.default_rng(request.seed)
        self.surrogate = Surrogate(table, hardware, num_samples=NUM_SAMPLES, rng=rng)
        self._errors = CompositionErrors(table.candidates, hardware.device_kind, request.seed, NUM_SAMPLES, rng)
        self._whole_models: dict[int, WholeModelRun] = {}
        self._correction: Correction | None = None
        self._fit_N = rng.standard_normal(NUM_SAMPLES)
        self._log = ObservationLog()
        self._pending: dict[int, Suggestion] = {}
        self._ordered: frozenset[Component] = frozenset()
        self._believer: SearchState | None = None
        self._failures = Failures()
        self._suggestion: Suggestion | None = None
        self._suggested = False
        self._refresh()

    @property
    def measured(self) -> dict[Component, ComponentMeasurement]:
        """The first run of every component that was measured."""
        return {component: runs.first for component, runs in self._log.runs.items()}

    # -- learning ------------------------------------------------------------------------------------------------

    def expect(self, number: int, suggestion: Suggestion) -> None:
        """Trial `number` is in flight, until it is learnt: what it measures is not suggested meanwhile."""
        self._pending[number] = suggestion
        self._believer = None

    def learn(self, measurements: Iterable[Measurement]) -> None:
        """Take in measurements, each component's first result alone."""
        self.learn_trials((FIRST, measurement) for measurement in measurements)

    def learn_trials(self, trials: Iterable[tuple[int, Measurement]]) -> None:
        """Take in numbered trials; one that is read twice counts once."""
        measured, before = False, self._num_troubles()
        for number, measurement in trials:
            if self._pending.pop(number, None) is not None:
                self._believer = None
            measured = self._log.add(number, measurement.components) or measured
            self._failures.take_in(measurement)
        self._update(measured, refresh=before != self._num_troubles())

    def absorb(self, found: Iterable[tuple[int, Sequence[ComponentMeasurement]]]) -> None:
        """Take in, by trial, components that another variant has had measured and this one has in common."""
        measured, before = False, self._num_troubles()
        for number, components in found:
            shared = [m for m in components if m.component in self.table.column]
            measured = self._log.add(number, shared) or measured
        self._update(measured, refresh=before != self._num_troubles())

    def reject(self, candidate: Candidate, reason: str) -> None:
        """Never recommend `candidate`."""
        self._failures.reject(candidate, reason)
        self._refresh()

    def reject_as_large(self, candidate: Candidate, reason: str) -> None:
        """Never recommend `candidate`, whose whole model did not fit, nor any that is composed to need as much."""
        self._failures.reject(candidate, reason, too_large=True)
        self._refresh()

    def learn_whole_model(self, candidate: Candidate, tokens_per_second: float, standard_error: float) -> None:
        """Take in a whole model's throughput, with its relative standard error: it corrects what is composed."""
        row = self.table.row[candidate]
        run = WholeModelRun(math.log(tokens_per_second), standard_error)
        if self._whole_models.get(row) != run:
            self._whole_models[row] = run
            self._refresh()

    # -- what is known of a candidate ----------------------------------------------------------------------------

    def is_known(self, row: int) -> bool:
        """Whether every component of a candidate is measured."""
        return bool(self._known_C[row])

    def fits(self, row: int) -> bool:
        """Whether a candidate is believed to fit: measured where it was measured, predicted where not."""
        return bool(self._fits_C[row])

    def is_open(self, row: int) -> bool:
        """Whether a candidate has neither failed nor been rejected nor uses a component that failed."""
        return bool(self._open_C[row])

    def wanted(self, row: int) -> tuple[Component, ...]:
        """The components of a candidate that are neither measured nor predicted well enough."""
        wanted_P = wanted_components(self.table, self.surrogate, np.array([row]))[0]
        return tuple(self.table.components[column] for column in self.table.columns_CP[row][wanted_P])

    def was_run_whole(self, row: int) -> bool:
        """Whether a candidate's whole model has been timed."""
        return row in self._whole_models

    def seconds(self, row: int) -> StepSeconds:
        """Expected seconds of a candidate's step, as its components compose it."""
        device, host = self.surrogate.device_mean_K[None, :], self.surrogate.host_K
        rows = np.array([row])
        micro_step = self.table.micro_step_seconds(device, host, rows)
        communication = self.table.communication_seconds(device, host, micro_step, self.surrogate.overlap, rows)
        return combine_seconds(
            float(micro_step[0, 0]),
            float(self.table.optimizer_seconds(device, host, rows)[0, 0]),
            int(self.table.micro_batch_C[row]),
            self.table.model,
            self.request,
            context_parallel_size=int(self.table.sharing_C[row]),
            communication=float(communication[0, 0]),
        )

    def expected_seconds(self, row: int) -> StepSeconds:
        """Seconds of a candidate's step as composed and corrected by the whole models that were run."""
        composed, factor = self.seconds(row), math.exp(-float(self._shift_C[row]))
        return StepSeconds(
            factor * composed.micro_step,
            factor * composed.optimizer,
            factor * composed.step,
            composed.tokens_per_second / factor,
            factor * composed.communication,
        )

    def bytes(self, row: int) -> StepBytes:
        """Expected bytes of a candidate's step, from measured components where there are any."""
        return self._step_bytes(row, self._saved_C, self._transient_C)

    def predicted_bytes(self, row: int) -> StepBytes:
        """Bytes of a candidate's step as predicted before anything was measured."""
        return self._step_bytes(row, *self.table.activation_bytes(*self.surrogate.predicted_bytes_3K))

    def known_rows(self) -> Ints:
        """Legal rows that fit and whose every component is measured."""
        return np.flatnonzero(self._legal_C & self._open_C & self._known_C & self._fits_C)

    def open_rows(self) -> Ints:
        """Legal rows that have neither failed nor been rejected."""
        return np.flatnonzero(self._legal_C & self._open_C)

    def mean_tokens_per_second(self) -> Floats:
        """Expected tokens/s of every candidate, shape (C,), whole models taken into account."""
        return self._mean_C

    # -- decisions -----------------------------------------------------------------------------------------------

    def recommend(self) -> Verdict | None:
        """The candidate with the highest expected throughput of those known well enough; null while there is none."""
        best = self._posterior.incumbent
        if best is None:
            return None
        probability = self._posterior.probability_best(best, self.request.tolerance)
        return Verdict(int(self._posterior.rows[best]), probability)

    def runner_up(self) -> tuple[int, float] | None:
        """The row of the candidate whose whole model is most likely to change the answer, and how likely that is.

        Of the candidates that are known well enough and were not run whole, the one with the highest probability of
        being faster than the recommended one by more than a quarter of the tolerance, composition error included; the
        faster of equals. A near-duplicate whose advantage would be smaller than that is not worth a run, however
        close it is. Null if there is none.
        """
        incumbent = self._posterior.incumbent
        if incumbent is None:
            return None
        posterior = self._posterior
        others = [
            i for i in np.flatnonzero(posterior.clear_A) if i != incumbent and not self.was_run_whole(posterior.rows[i])
        ]
        if not others:
            return None
        faster = posterior.probability_faster(incumbent, self.request.tolerance * MATTERS)
        best = max(others, key=lambda i: (faster[i], posterior.mean_A[i]))
        return int(posterior.rows[best]), float(faster[best])

    def suggest(self) -> Suggestion | None:
        """What to measure next; null when no measurement is expected to change anything.

        With trials in flight it is what would be suggested if each of them had measured what is expected of it.
        """
        if self._pending:
            self._believer = self._believer or self._believing()
            return self._believer.suggest()
        if not self._suggested:
            self._suggestion = suggest_measurement(
                self._posterior, self.table, self.surrogate, self.request.tolerance, self._count_attempts
            )
            self._suggested = True
        return self._suggestion

    def to_repeat(self, measurement: Measurement) -> Suggestion | None:
        """What of a contaminated measurement is to be measured again; null if nothing was contaminated, or too often."""
        row = self.table.row.get(measurement.candidate)
        if row is None or measurement.outcome is not Outcome.CONTAMINATED:
            return None
        contaminated = (m.component for m in measurement.components if m.contamination is not None)
        left = tuple(c for c in contaminated if self._log.count_contaminated(c) < CONTAMINATED_ATTEMPTS)
        return Suggestion(row, left, again=all(self._log.count(c) for c in left)) if left else None

    # -- internals -----------------------------------------------------------------------------------------------

    def _believing(self) -> SearchState:
        """A copy to which every trial in flight has happened as expected."""
        other = copy.copy(self)
        pending = [c for number in sorted(self._pending) for c in self._pending[number].components]
        other._pending, other._ordered = {}, frozenset(pending)
        other.surrogate = self.surrogate.believing(pending)
        other._refresh()
        return other

    def _count_attempts(self, component: Component) -> int:
        """How often a component was run; one that is in flight counts as if it had been often enough."""
        return MOST_RUNS if component in self._ordered else self._log.count_attempts(component)

    def _num_troubles(self) -> tuple[int, int]:
        return len(self._failures), self._log.num_contaminated

    def _update(self, measured: bool, *, refresh: bool = False) -> None:
        if measured:
            self.surrogate.fit(self._log.runs)
        if measured or refresh:
            self._refresh()

    def _refresh(self) -> None:
        table, surrogate = self.table, self.surrogate
        self._suggestion, self._suggested, self._believer = None, False, None
        self._composed_C: Floats = table.tokens_per_second(
            surrogate.device_mean_K[None, :], surrogate.host_K, overlap=surrogate.overlap
        )[0]
        self._correction = self._correct()
        self._shift_C: Floats = np.zeros(len(table.candidates))
        if self._correction is not None:
            everything = np.arange(len(table.candidates))
            self._shift_C = self._correction.mean(everything, self._log_composed(everything))
        self._mean_C: Floats = self._composed_C * np.exp(self._shift_C)
        self._saved_C, self._transient_C = table.activation_bytes(*surrogate.bytes_3K)
        self._required_C = self._required(self._saved_C + self._transient_C)
        self._fits_C: Mask = np.asarray(self._required_C <= self.limit_bytes)
        missing_CP = missing_components(table, surrogate, np.arange(len(table.candidates)))
        self._known_C: Mask = np.logical_not(missing_CP.any(axis=1))
        rejected_C = self._failures.rejected(table, self._required_C)
        self._open_C: Mask = np.asarray(~rejected_C & ~self._failures.failing(table, self._log))
        known, rows = self.known_rows(), self.open_rows()
        room = (1.0 - LEAST_SHARE) * (self._correction.scale if self._correction is not None else 1.0)
        least = max(0.0, 1.0 - room) * float(self._mean_C[known].max()) if known.size else 0.0
        self._posterior = self._look(contenders(table, surrogate, rows, least / np.exp(self._shift_C[rows])))

    def _correct(self) -> Correction | None:
        """What the whole models teach; null before one is run."""
        if not self._whole_models:
            return None
        rows_J = np.array(sorted(self._whole_models), dtype=np.int64)
        log_mean_J, log_composed_NJ = np.log(self._composed_C[rows_J]), self._log_composed(rows_J, NUM_SAMPLES)
        blocks_J = self.surrogate.step_run_std(self.table, rows_J)
        return self._errors.condition(self._whole_models, log_mean_J, log_composed_NJ, blocks_J)

    def _log_composed(self, rows: Ints, number: int | None = None) -> Floats:
        """Samples of the logarithms of composed tokens/s, shape (N, A); by default as many as there is time for."""
        number = number or int(np.clip(MOST_DRAWS // max(len(rows), 1), FEWEST_SAMPLES, NUM_SAMPLES))
        device_NK, host_K = self.surrogate.device_NK[:number], self.surrogate.host_K
        return np.asarray(np.log(self.table.tokens_per_second(device_NK, host_K, rows, self.surrogate.overlap)))

    def _look(self, rows: Ints) -> CandidatePosterior:
        table, surrogate = self.table, self.surrogate
        composed_NA = self._log_composed(rows)
        number = len(composed_NA)
        tokens_NA = composed_NA + self._errors.sample(number, rows)
        if self._correction is not None:
            part_NA, error_NA = self._correction.samples(rows, composed_NA)
            tokens_NA = composed_NA + self._errors.sample(number, rows, self._correction.scale) + part_NA + error_NA
            composed_NA = composed_NA + part_NA + self._correction.expected_errors(rows)
        std_A = np.where(table.used_CP[rows], surrogate.bytes_std_K[table.columns_CP[rows]], 0.0).max(
            axis=1, initial=0.0
        )
        activations_A = (self._saved_C + self._transient_C)[rows]
        # Where memory is tight nothing but a measurement tells whether a candidate fits: with an incumbent that some
        # samples hold to be too large, every other candidate would look worth measuring.
        tight_A = self._required(activations_A * np.exp(SURE * std_A), rows) > self.limit_bytes
        tight_A &= ~np.isin(rows, list(self._whole_models))
        tight = np.flatnonzero(tight_A)
        scale = np.exp(self._fit_N[:number, None] * std_A[tight])
        fits_NA = np.ones(composed_NA.shape, dtype=np.bool_)
        fits_NA[:, tight] = self._required(activations_A[tight] * scale, rows[tight]) <= self.limit_bytes
        missing_AP = missing_components(table, surrogate, rows)
        wanted_AP = np.where(tight_A[:, None], missing_AP, wanted_components(table, surrogate, rows))
        clear_A = ~wanted_AP.any(axis=1) & self._fits_C[rows]
        composed_NA, tokens_NA = (np.where(fits_NA, np.exp(log_NA), 0.0) for log_NA in (composed_NA, tokens_NA))
        return CandidatePosterior(rows, self._mean_C[rows], composed_NA, tokens_NA, wanted_AP, clear_A)

    def _required(self, activations: Floats, rows: Ints | slice = slice(None)) -> Floats:
        return required_table(self.table, activations, self.hardware, rows)

    def _step_bytes(self, row: int, saved_C: Floats, transient_C: Floats) -> StepBytes:
        parts = self.table.static_parts(row).model_copy(
            update={"activations": round(float(saved_C[row])), "transient": round(float(transient_C[row]))}
        )
        return StepBytes(parts, required_bytes(parts.total, self.hardware))
