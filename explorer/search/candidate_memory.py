"""The expected bytes of each candidate, and how likely it is to fit.

A step fits by definition if its composed peak with the stated allowance for fragmentation, context and margin is within
the limit. It may fail nevertheless, because the whole model's peak differs from the composed one and the allocator
cannot place everything. The samples contain both, so a candidate within the error of the limit counts for less than one
with headroom.
"""

from __future__ import annotations

import numpy as np

from explorer.cost_model.candidate_table import Floats, Ints, Mask, SpaceTable, required_table
from explorer.cost_model.step import FRAGMENTATION, GIB, MARGIN_BYTES, StepBytes, required_bytes
from explorer.spec.hardware import HardwareSpec
from explorer.surrogate.gaussian_process import Surrogate

MOST_DEVIATIONS = 4.0
"""A candidate is sure to fit if it fits with this many standard deviations more than the predicted bytes."""


COMPOSED_STD = 0.012
"""Relative standard deviation of a whole model's peak around the composed one, after every component was measured.

In benchmarks/results/h200-recorded-fidelity.json composed peaks are off by 0.1 to 1.2%, those of models that training
devices share by up to 5%.
"""
FRAGMENTATION_SHARE = 0.5
FRAGMENTATION_BYTES = 5 * GIB
"""The scale of what the allocator cannot place: this share of the stated allowance, and as much again for a peak of so
many bytes.

In benchmarks/results/tables, reserved over allocated bytes are 1.05 in the median for peaks below 5 GiB, 1.024 below
10, about 1.02 up to 40 and 1.005 above 80. A part of that is cached blocks, which the allocator gives back.
"""
HELD_SHARE = 0.5
"""Share of the margin that libraries hold, so that half of it is left."""
NEAR_LIMIT = 0.8
"""Candidates that need less than this share of the limit are sure to fit once they are measured."""


class MemoryErrors:
    """Standard normal draws behind the samples of bytes. Axes: N samples, C candidates.

    `components_N` scales the bytes of components that were not measured, of all candidates alike.
    """

    def __init__(self, num_candidates: int, num_samples: int, rng: np.random.Generator) -> None:
        self.components_N: Floats = rng.standard_normal(num_samples)
        self.composed_NC = rng.standard_normal((num_samples, num_candidates), dtype=np.float32)
        self.fragmentation_NC = np.abs(rng.standard_normal((num_samples, num_candidates), dtype=np.float32))


class CandidateMemory:
    """Expected bytes of every candidate. Axes: C candidates, A some of them, N posterior samples.

    `saved_C` and `transient_C` are the activations at the peak of a step, `required_C` is all that a step needs of the
    device, `fits_C` says whether that is within `limit_bytes`.
    """

    def __init__(self, table: SpaceTable, surrogate: Surrogate, hardware: HardwareSpec, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._table = table
        self._surrogate = surrogate
        self._hardware = hardware
        self.saved_C, self.transient_C = table.activation_bytes(*surrogate.bytes_3K)
        self.required_C = self._required(self.saved_C + self.transient_C)
        self.fits_C: Mask = np.asarray(self.required_C <= limit_bytes)

    def expected_bytes(self, row: int) -> StepBytes:
        """Expected bytes of a candidate's step, from its measured components where there are any."""
        return self._step_bytes(row, self.saved_C, self.transient_C)

    def predicted_bytes(self, row: int) -> StepBytes:
        """Bytes of a candidate's step as predicted before anything was measured."""
        return self._step_bytes(row, *self._table.activation_bytes(*self._surrogate.predicted_bytes_3K))

    def is_tight(self, rows: Ints) -> Mask:
        """Which of `rows` might not fit, shape (A,): its bytes may be `MOST_DEVIATIONS` above the prediction."""
        worst = self._activations(rows) * np.exp(MOST_DEVIATIONS * self._log_std(rows))
        return np.asarray(self._required(worst, rows) > self.limit_bytes)

    def is_near_limit(self, rows: Ints) -> Mask:
        """Which of `rows` may fail although they fit by definition, shape (A,)."""
        return np.asarray(self.is_tight(rows) | (self.required_C[rows] > NEAR_LIMIT * self.limit_bytes))

    def sample_fits(self, rows: Ints, normal_N: Floats) -> Mask:
        """Whether `rows` fit, shape (N, A): one standard normal draw a sample scales the bytes of every row alike."""
        return np.asarray(self._required(self._sampled(rows, normal_N), rows) <= self.limit_bytes)

    def sample_runs(self, rows: Ints, errors: MemoryErrors, number: int) -> Mask:
        """Whether the whole models of `rows` run, in the first `number` samples, shape (N, A)."""
        peak_NA = self._table.static_bytes_C[rows] + self._sampled(rows, errors.components_N[:number])
        peak_NA *= np.exp(COMPOSED_STD * errors.composed_NC[:number, rows])
        unplaced = FRAGMENTATION_SHARE * FRAGMENTATION[self._table.request.allocator]
        unplaced_NA = unplaced * errors.fragmentation_NC[:number, rows] * (peak_NA + FRAGMENTATION_BYTES)
        held = self._hardware.context_bytes + HELD_SHARE * MARGIN_BYTES[self._hardware.device_kind]
        return np.asarray(peak_NA + unplaced_NA + held <= self.limit_bytes)

    def _sampled(self, rows: Ints, normal_N: Floats) -> Floats:
        """Return samples of the composed activations of `rows`, shape (N, A)."""
        return np.asarray(self._activations(rows) * np.exp(normal_N[:, None] * self._log_std(rows)))

    def _activations(self, rows: Ints) -> Floats:
        return np.asarray((self.saved_C + self.transient_C)[rows])

    def _log_std(self, rows: Ints) -> Floats:
        """Relative standard deviation of the activations of `rows`, shape (A,): that of the least certain component."""
        std_AP = self._surrogate.bytes_std_K[self._table.columns_CP[rows]]
        return np.asarray(np.where(self._table.used_CP[rows], std_AP, 0.0).max(axis=1, initial=0.0))

    def _required(self, activations: Floats, rows: Ints | slice = slice(None)) -> Floats:
        return required_table(self._table, activations, self._hardware, rows)

    def _step_bytes(self, row: int, saved_C: Floats, transient_C: Floats) -> StepBytes:
        parts = self._table.static_parts(row).model_copy(
            update={"activations": round(float(saved_C[row])), "transient": round(float(transient_C[row]))}
        )
        return StepBytes(parts, required_bytes(parts.total, self._hardware, self._table.request.allocator))
