"""What an exploration knows, what it would recommend, and what it wants to know next."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from explorer.candidates import Candidate
from explorer.components import BlockRecompute, Component, ComponentKind
from explorer.composition import StepBytes, StepSeconds, combine_seconds, memory_limit, required_bytes
from explorer.hardware import HardwareSpec
from explorer.measurements import ComponentMeasurement, Measurement, Outcome
from explorer.memory import required_table
from explorer.requests import ExplorationRequest
from explorer.surrogate import Surrogate
from explorer.table import Floats, Ints, SpaceTable

NUM_SAMPLES = 256
COMPOSITION_STD = {"cuda": 0.003, "cpu": 0.01}
"""Error of a composed step that is a candidate's own; what candidates share does not change their order."""
OWN_SHARE_OF_ERROR = 0.25
"""Of a difference between composition and whole model, this share is taken to be the candidate's own."""
TRIAL_OVERHEAD_SECONDS = 0.15  # of building and warming up a component, before the first trials show it
TIMED_PASSES = 8
NEGLIGIBLE_GAIN = 1e-5  # expected relative gain of a measurement below which nothing is worth measuring

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The candidate to recommend, and the probability that it is within tolerance of the best, 0..1."""

    row: int
    probability: float


class Belief:
    """Knowledge about one model variant: measured components, failed ones, and the posterior over the rest.

    It depends on the seed and the set of measurements alone, not on their order, so that a resumed exploration goes
    the way it would have gone. `legal` marks the rows of the table that may be recommended; other rows (a base
    outside the space) are only predicted.
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
        self._composition_std = COMPOSITION_STD[hardware.device_kind]
        self._composition_NC = rng.standard_normal((NUM_SAMPLES, len(table.candidates)))
        self._fit_N = rng.standard_normal(NUM_SAMPLES)
        self.measured: dict[Component, ComponentMeasurement] = {}
        self.failed: dict[Component, str] = {}
        self._broken: set[Component] = set()  # crashed or timed out
        self.rejected: dict[Candidate, str] = {}
        self._suggestion: int | None = None
        self._suggested = False
        self._alive: Ints = np.flatnonzero(self._legal_C)
        self._tokens_NA: Floats = np.zeros((NUM_SAMPLES, 0))
        self._refresh()

    # -- learning ------------------------------------------------------------------------------------------------

    def learn(self, measurements: Iterable[Measurement]) -> None:
        """Take in measurements; the first result of a component stands."""
        before = (len(self.measured), len(self.failed), len(self.rejected))
        for measurement in measurements:
            for found in measurement.components:
                self.measured.setdefault(found.component, found)
            if measurement.outcome is not Outcome.OK:
                reason = measurement.reason or measurement.outcome.value
                if measurement.failed_component is not None:
                    self.failed.setdefault(measurement.failed_component, reason)
                    if measurement.outcome in {Outcome.CRASHED, Outcome.TIMED_OUT}:
                        self._broken.add(measurement.failed_component)
                else:
                    self.rejected.setdefault(measurement.candidate, reason)
        if before != (len(self.measured), len(self.failed), len(self.rejected)):
            self.surrogate.fit(self.measured)
            self._refresh()

    def absorb(self, found: Iterable[ComponentMeasurement]) -> None:
        """Take in components that another variant of the model has had measured and this one has in common."""
        fresh = {m.component: m for m in found if m.component in self.table.column and m.component not in self.measured}
        if fresh:
            self.measured.update(fresh)
            self.surrogate.fit(self.measured)
            self._refresh()

    def reject(self, candidate: Candidate, reason: str) -> None:
        """Never recommend `candidate`."""
        self.rejected[candidate] = reason
        self._refresh()

    def reject_as_large(self, candidate: Candidate, reason: str) -> None:
        """Never recommend `candidate`, whose whole model did not fit, nor any that is composed to need as much."""
        least = self._required_C[self.table.row[candidate]]
        for row in np.flatnonzero(self._required_C >= least):
            self.rejected.setdefault(self.table.candidates[row], reason)
        self._refresh()

    def learn_composition_error(self, error: float) -> None:
        """Take in the relative error of a composed step against its whole model: compositions err as much elsewhere."""
        std = max(self._composition_std, OWN_SHARE_OF_ERROR * abs(error))
        if std > self._composition_std:
            self._composition_std = std
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

    def seconds(self, row: int) -> StepSeconds:
        """Expected seconds of a candidate's step."""
        device, host = self.surrogate.device_mean_K[None, :], self.surrogate.host_K
        rows = np.array([row])
        return combine_seconds(
            float(self.table.micro_step_seconds(device, host, rows)[0, 0]),
            float(self.table.optimizer_seconds(device, host, rows)[0, 0]),
            int(self.table.micro_batch_C[row]),
            self.table.model,
            self.request,
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

    # -- decisions -----------------------------------------------------------------------------------------------

    def recommend(self) -> Verdict | None:
        """The fully measured candidate with the highest expected throughput; null while there is none."""
        mean = self.mean_tokens_per_second()
        known = self.known_rows()
        if known.size == 0:
            return None
        best = int(known[np.argmax(mean[known])])
        return Verdict(best, self._probability_best(best))

    def suggest(self) -> int | None:
        """The row to measure next: the highest expected gain over the incumbent a second of measuring.

        Null when no measurement is expected to change anything.
        """
        if not self._suggested:
            self._suggestion, self._suggested = self._choose(), True
        return self._suggestion

    def _choose(self) -> int | None:
        open_A = ~self._known_C[self._alive]
        if not open_A.any():
            return None
        incumbent_N = self._incumbent()
        gain_A = np.maximum(0.0, self._tokens_NA - incumbent_N[:, None]).mean(axis=0) / max(incumbent_N.mean(), 1e-9)
        gain_A = np.where(open_A, gain_A, 0.0)
        if gain_A.max() < NEGLIGIBLE_GAIN:
            return None
        missing_AK = self._missing()[self._alive]
        cost_A = missing_AK @ (TRIAL_OVERHEAD_SECONDS + TIMED_PASSES * self.surrogate.device_mean_K)
        rate_A = np.divide(gain_A, cost_A, out=np.zeros_like(gain_A), where=open_A)
        return int(self._alive[int(np.argmax(rate_A))])

    def mean_tokens_per_second(self) -> Floats:
        """Expected tokens/s of every candidate, shape (C,)."""
        mean: Floats = self.table.tokens_per_second(self.surrogate.device_mean_K[None, :], self.surrogate.host_K)[0]
        return mean

    # -- internals -----------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._suggestion, self._suggested = None, False
        bytes_3K = self.surrogate.bytes_3K
        self._saved_C, self._transient_C = self.table.activation_bytes(*bytes_3K)
        self._required_C = self._required(self._saved_C + self._transient_C)
        self._fits_C: Mask = np.asarray(self._required_C <= self.limit_bytes)
        self._known_C: Mask = np.logical_not(self._missing().any(axis=1))
        rejected_C = np.zeros(len(self.table.candidates), dtype=np.bool_)
        rejected_C[[self.table.row[c] for c in self.rejected if c in self.table.row]] = True
        self._open_C: Mask = np.asarray(~rejected_C & ~self._fails())
        fit_std_C = (self.table.uses_CK * self.surrogate.bytes_std_K[None, :]).max(axis=1)
        self._alive = self._contenders(self.open_rows())
        alive = self._alive
        tokens_NA = self.table.tokens_per_second(self.surrogate.device_NK, self.surrogate.host_K, alive)
        tokens_NA *= np.maximum(0.0, 1.0 + self._composition_std * self._composition_NC[:, alive])
        activations_A = (self._saved_C + self._transient_C)[alive]
        scale_NA = np.exp(self._fit_N[:, None] * fit_std_C[alive][None, :])
        fits_NA = self._required(activations_A[None, :] * scale_NA) <= self.limit_bytes
        self._tokens_NA = np.where(fits_NA, tokens_NA, 0.0)

    def _missing(self) -> Mask:
        return np.asarray(self.table.uses_CK & ~self.surrogate.known_K[None, :])

    def _contenders(self, rows: Ints) -> Ints:
        """Rows whose optimistic throughput reaches the best that is known; the others cannot decide anything."""
        device = self.surrogate.device_NK
        optimistic_K = np.exp(np.log(device).mean(axis=0) - 3.5 * np.log(device).std(axis=0))
        upper = self.table.tokens_per_second(optimistic_K[None, :], self.surrogate.host_K, rows)[0]
        mean = self.mean_tokens_per_second()
        known = rows[self._known_C[rows] & self._fits_C[rows]]
        if known.size == 0:
            return rows
        contenders: Ints = rows[upper >= 0.97 * mean[known].max()]
        return contenders

    def _incumbent(self) -> Floats:
        verdict = self.recommend()
        if verdict is None:
            return np.full(NUM_SAMPLES, 1e-9)
        return self._tokens_NA[:, int(np.searchsorted(self._alive, verdict.row))]

    def _probability_best(self, row: int) -> float:
        if self._tokens_NA.shape[1] == 0:
            return 0.0
        best_N = self._tokens_NA.max(axis=1)
        own_N = self._tokens_NA[:, int(np.searchsorted(self._alive, row))]
        return float((own_N >= (1.0 - self.request.tolerance) * best_N).mean())

    def _required(self, activations: Floats) -> Floats:
        return required_table(self.table, activations, self.hardware)

    def _step_bytes(self, row: int, saved_C: Floats, transient_C: Floats) -> StepBytes:
        parts = self.table.static.model_copy(
            update={"activations": round(float(saved_C[row])), "transient": round(float(transient_C[row]))}
        )
        return StepBytes(parts, required_bytes(parts.total, self.hardware))

    def _fails(self) -> Mask:
        """Candidates that use a component which failed, or a larger one of the same sort."""
        failing = np.array([self._component_fails(c) for c in self.table.components])
        return np.asarray((self.table.uses_CK & failing[None, :]).any(axis=1))

    def _component_fails(self, component: Component) -> bool:
        if component in self.measured:
            return False
        return any(at_least(component, failed, broken=failed in self._broken) for failed in self.failed)


def at_least(component: Component, failed: Component, *, broken: bool = False) -> bool:
    """Whether `component` does what `failed` could not do, or more of it.

    Recomputation runs what the plain block runs, and more: it helps where memory was short, not where it is `broken`.
    """
    if component == failed:
        return True
    if component.kind is not failed.kind or component.kind is ComponentKind.OPTIMIZER:
        return False
    runs_it = component.recompute is failed.recompute or (broken and failed.recompute is BlockRecompute.NONE)
    same = (component.backend, component.num_query_groups) == (failed.backend, failed.num_query_groups)
    if not (same and runs_it) or (component.bta_tile is None) != (failed.bta_tile is None):
        return False
    return component.micro_batch_size >= failed.micro_batch_size and (component.bta_tile or 0) >= (failed.bta_tile or 0)
