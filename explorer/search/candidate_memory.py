"""The expected bytes of each candidate, and which candidates fit."""

from __future__ import annotations

import numpy as np

from explorer.cost_model.candidate_table import Floats, Ints, Mask, SpaceTable, required_table
from explorer.cost_model.step import StepBytes, required_bytes
from explorer.spec.hardware import HardwareSpec
from explorer.surrogate.gaussian_process import Surrogate

MOST_DEVIATIONS = 4.0
"""A candidate is sure to fit if it fits with this many standard deviations more than the predicted bytes."""


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

    def sample_fits(self, rows: Ints, normal_N: Floats) -> Mask:
        """Whether `rows` fit, shape (N, A): one standard normal draw a sample scales the bytes of every row alike."""
        scale_NA = np.exp(normal_N[:, None] * self._log_std(rows))
        return np.asarray(self._required(self._activations(rows) * scale_NA, rows) <= self.limit_bytes)

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
