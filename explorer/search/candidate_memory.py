"""The expected bytes of each candidate, and how likely it is to fit.

A step fits by definition if its composed peak is within the limit, together with the stated allowance for
fragmentation, the context and the margin. The whole model's peak differs from the composed one, and the allocator
cannot place everything. So a candidate below the limit may fail, and one above it may fit. The samples contain both
errors: a candidate close to the limit counts for less than one with headroom, and for something even above the limit.
Only its whole model decides whether it fits. The peaks of whole models that were run correct the predictions for other
candidates, and so does a whole model that ran out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
from scipy.special import ndtri

from bexp.explorer.cost.composition import Composition, Floats, Ints, Mask, required_table
from bexp.explorer.cost.step import FRAGMENTATION, GIB, MARGIN_BYTES, StepBytes, required_bytes
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.surrogate.gaussian_process import Surrogate
from bexp.explorer.surrogate.peak_error import PeakErrors, probability_below

MOST_DEVIATIONS = 4.0
"""A candidate is sure to fit if it fits with this many standard deviations more than the predicted bytes."""


LEAST_LIKELY = 0.0005
"""A candidate above the limit is ruled out if its whole model is less likely than this to fit.

At a tolerance of 1%, a run of it is worth its seconds only if it is at least 40% faster than what fits
(`find_above_limit`).
"""
FRAGMENTATION_SHARE = 0.5
FRAGMENTATION_BYTES = 5 * GIB
"""The scale of what the allocator cannot place: this share of the stated allowance, and as much again for a peak of so
many bytes.

In benchmarks/results/tables, reserved over allocated bytes are 1.05 in the median for peaks below 5 GiB, 1.024 below
10, about 1.02 up to 40 and 1.005 above 80. A part of that is cached blocks, which the allocator gives back.
"""
FRAGMENTATION_POINTS: Floats = ndtri(0.5 + (np.arange(8) + 0.5) / 16)
"""Equally likely draws of what the allocator cannot place, in scales."""
HELD_SHARE = 0.5
"""Share of the margin that libraries hold, so that half of it is left."""
NEAR_LIMIT = 0.8
"""Candidates that need less than this share of the limit are sure to fit once they are measured."""


class MemoryErrors:
    """Draws behind the samples of bytes, of which those without a text are standard normal. N samples, C candidates."""

    def __init__(self, num_candidates: int, num_samples: int, rng: np.random.Generator) -> None:
        self.components_N: Floats = rng.standard_normal(num_samples)
        """For the bytes of components that were not measured, of all candidates alike."""
        self.peaks = PeakErrors(num_candidates, num_samples, rng)
        """The errors of composed peaks."""
        self.fragmentation_NC = np.asfortranarray(
            np.abs(rng.standard_normal((num_samples, num_candidates), dtype=np.float32))
        )


class CandidateMemory:
    """Expected bytes of every candidate. Axes: C candidates, A some of them, N posterior samples."""

    def __init__(
        self,
        table: Composition,
        surrogate: Surrogate,
        hardware: HardwareSpec,
        limit_bytes: int,
        whole_peaks: Mapping[int, int] | None = None,
        too_large: Collection[int] = (),
    ) -> None:
        self.limit_bytes = limit_bytes
        self._table = table
        self._surrogate = surrogate
        self._hardware = hardware
        self.saved_C, self.transient_C = table.activation_bytes(*surrogate.bytes_3K)
        composed_C = self.saved_C + self.transient_C
        self.required_C = self._required(composed_C)
        """All that a step needs; `saved_C` and `transient_C` are its activations at the peak."""
        whole = dict(whole_peaks or {})
        peak_C = table.static_bytes_C + composed_C
        if table.candidates[0].is_whole:  # what was measured was the whole
            measured_C = self._log_std(np.arange(len(peak_C))) == 0.0
            whole |= {int(row): round(peak_C[row]) for row in np.flatnonzero(measured_C)}
        for row, peak in whole.items():
            needed = required_bytes(peak, hardware, table.request.allocator)
            if needed <= limit_bytes < self.required_C[row]:
                self.required_C[row] = needed
        self.fits_C: Mask = np.asarray(self.required_C <= limit_bytes)
        """Whether a step fits: as composed, or by the peak of its whole model if that was run."""
        measured = [row for row in whole if not self._log_std(np.array([row]))[0]]
        self._whole_peaks, self._peak_C = whole, peak_C
        self._errors_of_peaks = [math.log(whole[row] / peak_C[row]) for row in measured]
        room_C = limit_bytes - self._required(-table.static_bytes_C.astype(np.float64))
        most_C = np.log(np.maximum(room_C / (1 + FRAGMENTATION[table.request.allocator]), 1.0) / peak_C)
        self.explained = frozenset(row for row in too_large if self._is_explained(row, peak_C[row]))
        """The rows of `too_large` for which the error of composed peaks explains that their whole models are."""
        self._bounds = [self._exceeded(peak_C[row]) for row in sorted(self.explained)]
        self.chance_C: Floats = probability_below(most_C, self._errors_of_peaks, self._bounds)
        """The probability that the whole model of a measured candidate fits; 0 once it was run."""
        self.chance_C[list(whole)] = 0.0
        self.may_fit_C: Mask = np.asarray(self.fits_C | (self.chance_C >= LEAST_LIKELY))
        """Also marks the candidates that do not fit as composed, and whose whole model may fit."""

    def expected_bytes(self, row: int) -> StepBytes:
        """Expected bytes of a candidate's step, from its measured components where there are any.

        `required` is that of its whole model's peak if that was run.
        """
        composed, whole = self._step_bytes(row, self.saved_C, self.transient_C), self.whole_peak(row)
        if whole is None:
            return composed
        return StepBytes(composed.parts, required_bytes(whole, self._hardware, self._table.request.allocator))

    def predicted_bytes(self, row: int) -> StepBytes:
        """Bytes of a candidate's step as predicted before anything was measured."""
        return self._step_bytes(row, *self._table.activation_bytes(*self._surrogate.predicted_bytes_3K))

    def whole_peak(self, row: int) -> int | None:
        """The peak of a candidate's whole model; None if it was not run."""
        return self._whole_peaks.get(row)

    def probability_fits(self, row: int) -> float:
        """The probability that a candidate's whole model fits, whatever the allocator cannot place."""
        whole = self.whole_peak(row)
        if whole is not None:
            return float((self._exceeded(whole) >= 0.0).mean())
        return float(probability_below(self._exceeded(self._peak_C[row]), self._errors_of_peaks, self._bounds).mean())

    def is_tight(self, rows: Ints) -> Mask:
        """Mark those of `rows` that do not fit with `MOST_DEVIATIONS` more than the predicted bytes, shape (A,)."""
        worst = self._activations(rows) * np.exp(MOST_DEVIATIONS * self._log_std(rows))
        return np.asarray(self._required(worst, rows) > self.limit_bytes)

    def surely_fits(self, rows: Ints) -> Mask:
        """Mark those of `rows` that fit even with more bytes than expected, and need not be measured, shape (A,)."""
        return np.asarray(self.fits_C[rows] & ~self.is_tight(rows))

    def is_near_limit(self, rows: Ints) -> Mask:
        """Mark those of `rows` that may fail although they fit by definition, shape (A,)."""
        return np.asarray(self.is_tight(rows) | (self.required_C[rows] > NEAR_LIMIT * self.limit_bytes))

    def sample_fits(self, rows: Ints, normal_N: Floats) -> Mask:
        """Whether `rows` fit, shape (N, A): one standard normal draw a sample scales the bytes of every row alike."""
        return np.asarray(self._required(self._sampled(rows, normal_N), rows) <= self.limit_bytes)

    def sample_runs(self, rows: Ints, errors: MemoryErrors, number: int) -> Mask:
        """Whether the whole models of `rows` run, in the first `number` samples, shape (N, A).

        Rows that do not fit as composed must fit as whole models, with the allowance and the margin.
        """
        static_A = self._table.static_bytes_C[rows]
        composed_NA = self._sampled(rows, errors.components_N[:number])
        peak_NA = static_A + composed_NA
        peak_NA *= np.exp(errors.peaks.sample(rows, number, self._errors_of_peaks, self._bounds))
        unplaced = FRAGMENTATION_SHARE * FRAGMENTATION[self._table.request.allocator]
        unplaced_NA = unplaced * errors.fragmentation_NC[:number, rows] * (peak_NA + FRAGMENTATION_BYTES)
        least_NA = self._required(np.minimum(composed_NA, peak_NA - static_A), rows)
        return np.asarray((peak_NA + unplaced_NA + self._held <= self.limit_bytes) & (least_NA <= self.limit_bytes))

    @property
    def _held(self) -> float:
        """Bytes that the context and libraries hold."""
        return self._hardware.context_bytes + HELD_SHARE * MARGIN_BYTES[self._hardware.device_kind]

    def _is_explained(self, row: int, peak: float) -> bool:
        """Whether a measured candidate's error can be as large as running out of memory takes."""
        if self._log_std(np.array([row]))[0]:
            return False
        fits = probability_below(self._exceeded(peak), self._errors_of_peaks)
        return bool(1.0 - fits.mean() >= LEAST_LIKELY)

    def _exceeded(self, peak: float) -> Floats:
        """The errors of a composed peak above which it runs out of memory, one for each draw of fragmentation."""
        unplaced_Q = FRAGMENTATION_SHARE * FRAGMENTATION[self._table.request.allocator] * FRAGMENTATION_POINTS
        most_Q = (self.limit_bytes - self._held - unplaced_Q * FRAGMENTATION_BYTES) / (1.0 + unplaced_Q)
        return np.asarray(np.log(np.maximum(most_Q, 1.0) / peak))

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
