"""The throughput of each candidate: composed of its components, corrected by the whole models that were run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from bexp.explorer.cost.composition import Composition, Floats, Ints
from bexp.explorer.cost.step import StepSeconds, combine_seconds
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.surrogate.gaussian_process import Surrogate
from bexp.explorer.surrogate.whole_model_error import (
    CompositionErrors,
    Correction,
    ReportedError,
    WholeModelRun,
    sample_in_blocks,
)

NUM_SAMPLES = 256
FEWEST_SAMPLES = 64
MOST_DRAWS = 2**20
"""The most samples times candidates. Fewer samples are enough while little is known and many candidates are left."""


class CandidateThroughput:
    """Tokens/s of every candidate. Axes: C candidates, A some of them, J those that were run whole, N samples.

    `mean_C` is the expected throughput, whole models and reported runs taken into account.
    """

    def __init__(
        self,
        table: Composition,
        surrogate: Surrogate,
        errors: CompositionErrors,
        whole_models: Mapping[int, WholeModelRun],
        reported: Sequence[ReportedError] = (),
    ) -> None:
        self._table = table
        self._surrogate = surrogate
        self._errors = errors
        self._composed_C: Floats = table.tokens_per_second(
            surrogate.device_mean_K[None, :], surrogate.host_K, overlap=surrogate.overlap, texts=surrogate.texts
        )[0]
        self._correction = self._correct(whole_models, reported)
        self.shift_C: Floats = np.zeros(len(table.candidates))
        if self._correction is not None:
            everything = np.arange(len(table.candidates))
            self.shift_C = self._correction.mean(everything, self._log_composed(everything))
        self.mean_C: Floats = self._composed_C * np.exp(self.shift_C)

    @property
    def scale(self) -> float:
        """The factor by which composition errors are larger than recorded ones; 1 before anything shows them."""
        return self._correction.scale if self._correction is not None else 1.0

    def seconds(self, row: int, request: ExplorationRequest) -> StepSeconds:
        """Expected seconds of a candidate's step, as its components compose it."""
        table, surrogate = self._table, self._surrogate
        device, host = surrogate.device_mean_K[None, :], surrogate.host_K
        rows = np.array([row])
        micro_step = table.micro_step_seconds(device, host, rows, surrogate.texts)
        communication = table.communication_seconds(device, host, micro_step, surrogate.overlap, rows)
        return combine_seconds(
            float(micro_step[0, 0]),
            float(table.optimizer_seconds(device, host, rows)[0, 0]),
            int(table.micro_batch_C[row]),
            table.model,
            request,
            context_parallel_size=int(table.sharing_C[row]),
            communication=float(communication[0, 0]),
        )

    def corrected_seconds(self, row: int, request: ExplorationRequest) -> StepSeconds:
        """Expected seconds of a candidate's step, corrected by the whole models that were run."""
        composed, factor = self.seconds(row, request), math.exp(-float(self.shift_C[row]))
        return StepSeconds(
            factor * composed.micro_step,
            factor * composed.optimizer,
            factor * composed.step,
            composed.tokens_per_second / factor,
            factor * composed.communication,
        )

    def sample_logs(self, rows: Ints) -> tuple[Floats, Floats]:
        """Samples of the logarithm of tokens/s of `rows`, each of shape (N, A).

        The first is what the components compose, without the composition's own error; the second is the whole model's.
        Both take the whole models that were run into account.
        """
        composed_NA = self._log_composed(rows)
        number = len(composed_NA)
        if self._correction is None:
            return composed_NA, composed_NA + sample_in_blocks(lambda some: self._errors.sample(number, some), rows)
        part_NA, error_NA = self._correction.samples(rows, composed_NA)
        tokens_NA = composed_NA + self._errors.sample(number, rows, self._correction.scale, self._correction.rows_J)
        tokens_NA += part_NA + error_NA
        return composed_NA + part_NA + self._correction.expected_errors(rows), tokens_NA

    def _correct(
        self, whole_models: Mapping[int, WholeModelRun], reported: Sequence[ReportedError]
    ) -> Correction | None:
        """The correction that follows from the whole models and the reported runs; None if there is neither."""
        if not whole_models:
            nothing = np.empty(0)
            unknown_NJ = np.empty((NUM_SAMPLES, 0))
            return self._errors.condition({}, nothing, unknown_NJ, nothing, reported) if reported else None
        rows_J = np.array(sorted(whole_models), dtype=np.int64)
        log_mean_J, log_composed_NJ = np.log(self._composed_C[rows_J]), self._log_composed(rows_J, NUM_SAMPLES)
        blocks_J = self._surrogate.step_run_std(self._table, rows_J)
        return self._errors.condition(whole_models, log_mean_J, log_composed_NJ, blocks_J, reported)

    def _log_composed(self, rows: Ints, number: int | None = None) -> Floats:
        """Samples of the logarithm of composed tokens/s, shape (N, A); by default as many as there is time for."""
        number = number or int(np.clip(MOST_DRAWS // max(len(rows), 1), FEWEST_SAMPLES, NUM_SAMPLES))
        device_NK, host_NK = self._surrogate.device_NK[:number], self._surrogate.host_NK[:number]
        known = self._surrogate.overlap, self._surrogate.texts
        return sample_in_blocks(
            lambda some: np.asarray(np.log(self._table.tokens_per_second(device_NK, host_NK, some, *known))), rows
        )
