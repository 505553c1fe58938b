"""The error of composed steps against whole models: its prior, and its posterior given the whole models that were run.

The error is the logarithm of whole over composed tokens/s. It is the sum of four parts. All candidates of a model share
the first, and the candidates of a recomputation policy the second. The third changes smoothly with the micro-batch
size, and the fourth is each candidate's own. The first part is wide and does not change the order of candidates. One
whole model shows most of it, so candidates that were run whole stay comparable with those that were not. The third part
makes a candidate less certain the further its size is from one that was run whole.

Candidates with CUDA graphs have the parts of those whose kernels they replay, and another that all of them share, the
effect of a replay. So whole models are not run only to separate such a pair, and one pair shows the effect on all
others. Candidates whose layers are compiled also share a part: the effect of compiled layers on one another.

A model that is measured whole, such as that of a training command, is not composed: its candidates have no parts of
their own or of their sizes.

A candidate's own part has heavy tails: Student's t distribution (as in Shah et al., 2014, arXiv:1402.4306, but of each
candidate by itself), drawn as a normal number times a scale of its own. Once the candidate is run whole, the run shows
more than the tails, and its own part counts as Gaussian.

All parts are wider by the same factor if the whole models show it: by their distance from their compositions, or by
repeated runs that differ far more than the noise of their blocks explains.

Real training runs of earlier explorations show the error, too (`ReportedError`): of the same model on the same device,
with other measurements of the components.

Samples are conditioned by Matheron's rule (Wilson et al., 2020, arXiv:2002.09309). A whole model also corrects the
noisy seconds of its components. For that, the covariance of the composed throughputs is estimated from their samples,
as an ensemble Kalman filter does (Evensen, 1994).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from bexp.explorer.cost.composition import Floats, Ints
from bexp.explorer.dimensions.candidate import Candidate

Value = TypeVar("Value", bound=np.generic)

BLOCK_ROWS = 512
"""With a hundred samples, an array over a block takes half a megabyte."""


def sample_in_blocks(sample: Callable[[Ints], npt.NDArray[Value]], rows: Ints) -> npt.NDArray[Value]:
    """Return `sample(rows)`, shape (N, A) or (A,), where each column depends on its own row alone."""
    if rows.size <= BLOCK_ROWS:
        return sample(rows)
    blocks = [sample(rows[start : start + BLOCK_ROWS]) for start in range(0, rows.size, BLOCK_ROWS)]
    return np.concatenate(blocks, axis=-1)


RUN_STD = {"cuda": 0.003, "cpu": 0.01}
"""Standard deviation between runs of one whole model, beyond its stated standard error and the noise of its blocks.

A device drifts by about as much between trials. The two runs of each of two candidates on an H100 differed by 0.3 and
1.0% (benchmarks/results/h100-explorations.json).
"""
NOISE_RUNS = 1
"""The weight of the prior of their noise, in repeated whole models.

The prior is the noise of the blocks as if all of them were slow or fast together. In a whole model a part of it
averages out, and only repeated runs show how much.
"""
UNSTEADY = 10.0
"""The ratio of the variance of repeated whole models to the expected one from which the device counts as unsteady.

By chance two runs of one whole model show as much about once in 100,000 times.
"""


@dataclass(frozen=True, slots=True)
class WholeModelRun:
    """The runs of a candidate's whole model.

    `log_tokens` is the mean of the logarithms of their tokens/s, and `squares` the sum of their squared distances
    from it. `standard_error` is the relative one that a run states.
    """

    log_tokens: float
    standard_error: float
    number: int = 1
    squares: float = 0.0

    @classmethod
    def of(cls, tokens_per_second: Sequence[float], standard_errors: Sequence[float]) -> WholeModelRun:
        """Return the summary of several runs of one candidate."""
        logs = np.log(tokens_per_second)
        stated = float(np.sqrt(np.mean(np.square(standard_errors))))
        return cls(float(logs.mean()), stated, len(logs), float(((logs - logs.mean()) ** 2).sum()))


class WholeModelRuns:
    """The timed whole models of a variant, by row of its table. All runs of a candidate count together."""

    def __init__(self) -> None:
        self._by_trial: dict[int, dict[int, tuple[float, float]]] = {}
        self._runs: dict[int, WholeModelRun] = {}
        self._peaks: dict[int, int] = {}

    @property
    def by_row(self) -> Mapping[int, WholeModelRun]:
        """The summary of the runs of each candidate."""
        return self._runs

    @property
    def peaks(self) -> Mapping[int, int]:
        """The peak bytes of each candidate in its last run that states them."""
        return self._peaks

    def learn(self, row: int, trial: int, figures: tuple[float, float], peak_bytes: int | None) -> None:
        """Learn tokens/s and their relative standard error from a trial."""
        runs = self._by_trial.setdefault(row, {})
        runs[trial] = figures
        run = WholeModelRun.of(*zip(*(runs[each] for each in sorted(runs)), strict=True))
        self._runs[row] = run
        if peak_bytes is not None:
            self._peaks[row] = peak_bytes

    def was_run(self, row: int) -> bool:
        """Return whether a candidate's whole model has been timed."""
        return row in self._runs

    def count(self, row: int) -> int:
        """Return how often a candidate's whole model has been timed."""
        return len(self._by_trial.get(row, ()))

    def tokens_per_second(self, row: int) -> float | None:
        """Return the tokens/s of a candidate's whole model, the geometric mean of its runs; None without a run."""
        run = self._runs.get(row)
        return None if run is None else math.exp(run.log_tokens)


class WholeModelNoise:
    """The noise of whole models on a kind of device, from the J candidates that were run whole.

    `blocks_std_J` is the relative standard deviation between runs of their steps by the noise of their blocks.
    """

    def __init__(self, device_kind: str, runs: Sequence[WholeModelRun], blocks_std_J: Floats) -> None:
        stated_J = np.array([run.standard_error for run in runs])
        self._number_J = np.array([run.number for run in runs], dtype=np.float64)
        self._variance_J: Floats = stated_J**2 + RUN_STD[device_kind] ** 2 + blocks_std_J**2
        squares = float((np.array([run.squares for run in runs]) / self._variance_J).sum())
        self._share = (NOISE_RUNS + squares) / (NOISE_RUNS + float((self._number_J - 1).sum()))

    @property
    def unsteadiness(self) -> float:
        """The ratio of the noise to the expected noise, where it is surely larger; else 1.

        Blocks are measured on the same device, a moment earlier or later, so their composition varies as well.
        """
        return math.sqrt(self._share) if self._share >= UNSTEADY else 1.0

    @property
    def of_means(self) -> Floats:
        """Relative standard deviations of the means of the runs, shape (J,)."""
        return np.asarray(np.sqrt(self._variance_J / self._number_J * self._share))


OWN_STD = {"cuda": 0.0032, "cpu": 0.008}
"""Standard deviation of the part that is a candidate's own.

It is the scale of Student's t distribution, whose standard deviation is 1.7 times as large. In
benchmarks/results/h200-recorded-fidelity.json, the candidates within 7% of their table's best that are limited by the
device scatter around their mean error by 0.8 to 1.0% (five tables). The noise of their components, 0.4% (attention) to
2.5% (FFN) a run, explains 0.5 to 1.0% of a step. If it explains 0.6%, this value and SIZE_STD are what remains.
"""
OWN_DEGREES = 3.0
"""Degrees of freedom of the own part: about one error in seventy exceeds three standard deviations."""
SIZE_STD = 0.004
SIZE_OCTAVES = 2.0
"""Standard deviation of the part that changes with the micro-batch size, and its correlation length in octaves.

In the same file, two candidates of one policy differ by 0.8 to 1.1% if their sizes are equal or neighbours, and by 0.9
to 1.4% two or three octaves apart.
"""
POLICY_STD = 0.005
"""Standard deviation of the part that candidates share if they have the same policy, layout, sharding and
compiler.

Tiled and untiled candidates do not share it. In the same file, the error of a policy differs from that of no
recomputation at the same micro-batch size by 0.8% in the median of the absolute values, components' noise included.
"""
COMMON_STD = {"cuda": 0.03, "cpu": 0.10}
"""Standard deviation of the part that all candidates of a model share.

It is wide compared with the others, so that an error of all candidates is not attributed to one.
"""
REPLAY_STD = 0.002
"""Standard deviation of the part that all candidates with CUDA graphs share.

A replay has the same kernels with the same blocks' seconds. It leaves out the gaps between kernels, of about a
microsecond each where the device sets the pace. Three pairs of whole models with the same compiled code, with and
without graphs, differ by -1.3, -0.1 and +0.6% (benchmarks/results/h100-default-explorations.json), as single runs do.
"""
COMPILED_STD = 0.012
"""Standard deviation of the part that all candidates with compiled layers share.

In benchmarks/results/h100-real-trainers.json, the composed steps of compiled answers are off by 2.6% to the one side
and 0.6% to the other (five runs, three models).
"""
REPORT_STD = 0.02
"""Standard deviation of a reported run in addition to the composition's error: by its data, its logging, and the
measured components of the exploration that recommended it.
"""
JITTER = 1e-10
NOTHING: Ints = np.array([], dtype=np.int64)
PRIOR_RUNS = 4
"""The weight of the prior of the scale of all three parts, in whole models.

The scale grows if whole models are further off than the parts explain: it is the mean of an inverse gamma distribution
with this many prior degrees of freedom. It never falls below 1, the scale of the recorded errors.
"""


@dataclass(frozen=True, slots=True)
class ReportedError:
    """The composition's error of the candidate in a row from real runs: the logarithm of reached over composed."""

    row: int
    log_error: float


class CompositionErrors:
    """Samples of the error of every candidate's composition.

    Axes: N samples, C candidates, A some of them, J those that were run whole. The samples are drawn once. The noise of
    each whole model is drawn with a seed of its own, so nothing depends on the order in which whole models were run.
    """

    def __init__(
        self, candidates: Sequence[Candidate], device_kind: str, seed: int, num_samples: int, rng: np.random.Generator
    ) -> None:
        self._seed = seed
        self.device_kind = device_kind
        is_composed = not candidates[0].is_whole
        self._own_std, self._size_std = is_composed * OWN_STD[device_kind], is_composed * SIZE_STD
        self._own_NC = np.asfortranarray(rng.standard_normal((num_samples, len(candidates)), dtype=np.float32))
        self._kernels_C: Ints = _same_kernels(candidates)
        policies = [
            (
                c.recompute.value,
                c.bta_tile is not None,
                c.context_parallel_size,
                c.context_parallel_layout or "",
                c.sharding or "",
                "" if c.execution is None else c.execution.captured,
            )
            for c in candidates
        ]
        codes = {policy: i for i, policy in enumerate(sorted(set(policies)))}
        self._policy_C: Ints = np.array([codes[policy] for policy in policies])
        self._policy_NP = np.asfortranarray(rng.standard_normal((num_samples, len(codes))))
        self._common_N = rng.standard_normal(num_samples)
        sizes, index_C = np.unique([c.micro_batch_size for c in candidates], return_inverse=True)
        self._size_C: Ints = index_C.reshape(-1)
        octaves = np.log2(sizes)
        self._alike_SS = np.exp(-0.5 * ((octaves[:, None] - octaves) / SIZE_OCTAVES) ** 2)
        factor = np.linalg.cholesky(self._alike_SS + JITTER * np.eye(len(sizes)))
        self._size_NS = np.asfortranarray(rng.standard_normal((num_samples, len(sizes))) @ factor.T)
        squares_NC = rng.chisquare(OWN_DEGREES, (num_samples, len(candidates))) / OWN_DEGREES
        self._tail_NC = np.asfortranarray((1.0 / np.sqrt(squares_NC)).astype(np.float32))
        executions = [candidate.execution for candidate in candidates]
        self._replayed_C: Floats = np.array([float(one is not None and one.replays) for one in executions])
        self._replay_N: Floats = rng.standard_normal(num_samples) if self._replayed_C.any() else np.zeros(num_samples)
        compiled_C = np.array([float(one is not None and one.compiles) for one in executions])
        self._compiled_C: Floats = np.zeros_like(compiled_C) if compiled_C.all() else compiled_C
        self._compiled_N: Floats = rng.standard_normal(num_samples) if compiled_C.any() else np.zeros(num_samples)

    def sample(self, number: int, rows: Ints, scale: float = 1.0, run_whole: Ints = NOTHING) -> Floats:
        """Return the first `number` prior samples of the errors of `rows`, shape (N, A).

        Those of them that are `run_whole` have no heavy tails.
        """
        own_A = self._kernels_C[rows]
        tail_NA = np.where(np.isin(own_A, self._kernels_C[run_whole]), np.float32(1.0), self._tail_NC[:number, own_A])
        error_NA = self._own_std * (self._own_NC[:number, own_A] * tail_NA).astype(np.float64)
        error_NA += self._size_std * self._size_NS[:number, self._size_C[rows]]
        error_NA += POLICY_STD * self._policy_NP[:number, self._policy_C[rows]]
        error_NA += COMMON_STD[self.device_kind] * self._common_N[:number, None]
        error_NA += REPLAY_STD * self._replay_N[:number, None] * self._replayed_C[rows]
        error_NA += COMPILED_STD * self._compiled_N[:number, None] * self._compiled_C[rows]
        return np.asarray(scale * error_NA)

    def covariance(self, rows: Ints, others: Ints, scale: float = 1.0) -> Floats:
        """Return the prior covariance of the errors of `rows` with those of `others`, shape (A, J)."""
        own = self._kernels_C[rows][:, None] == self._kernels_C[others]
        policy = self._policy_C[rows][:, None] == self._policy_C[others]
        alike = self._alike_SS[np.ix_(self._size_C[rows], self._size_C[others])]
        parts = self._own_std**2 * own + self._size_std**2 * alike + POLICY_STD**2 * policy
        parts += REPLAY_STD**2 * np.outer(self._replayed_C[rows], self._replayed_C[others])
        parts += COMPILED_STD**2 * np.outer(self._compiled_C[rows], self._compiled_C[others])
        return np.asarray(scale**2 * (parts + COMMON_STD[self.device_kind] ** 2))

    def condition(
        self,
        runs: Mapping[int, WholeModelRun],
        log_mean_J: Floats,
        log_composed_NJ: Floats,
        blocks_std_J: Floats,
        reported: Sequence[ReportedError] = (),
    ) -> Correction:
        """Return the correction that follows from `runs` by row and from `reported` errors, at least one of them.

        `log_mean_J` and `log_composed_NJ` are mean and samples of the logarithm of their composed tokens/s, in the
        order of the rows. `blocks_std_J` is the relative standard deviation between runs of the step by the noise of
        its blocks.
        """
        rows_J = np.array(sorted(runs), dtype=np.int64)
        in_order = [runs[row] for row in sorted(runs)]
        log_tokens_J = np.array([run.log_tokens for run in in_order])
        noise = WholeModelNoise(self.device_kind, in_order, blocks_std_J)
        noise_J = noise.of_means
        draws_NJ = self._noise([[self._seed, int(row)] for row in rows_J], len(log_composed_NJ))
        if reported:  # an error is observed by itself: nothing composed is in it
            number = len(reported)
            rows_J = np.concatenate([rows_J, [each.row for each in reported]])
            log_tokens_J = np.concatenate([log_tokens_J, [each.log_error for each in reported]])
            noise_J = np.concatenate([noise_J, np.full(number, REPORT_STD)])
            log_mean_J = np.concatenate([log_mean_J, np.zeros(number)])
            log_composed_NJ = np.hstack([log_composed_NJ, np.zeros((len(log_composed_NJ), number))])
            seeds = [[self._seed, each.row, place] for place, each in enumerate(reported, 1)]
            draws_NJ = np.hstack([draws_NJ, self._noise(seeds, len(log_composed_NJ))])
        centred_NJ = log_composed_NJ - log_composed_NJ.mean(axis=0)
        around = centred_NJ.T @ centred_NJ / (len(centred_NJ) - 1) + np.diag(noise_J**2)
        distance_J = log_tokens_J - log_mean_J
        surprise = float(distance_J @ np.linalg.solve(around + self.covariance(rows_J, rows_J), distance_J))
        shown = float(np.sqrt(max(1.0, (PRIOR_RUNS + surprise) / (PRIOR_RUNS + len(rows_J)))))
        scale = max(shown, noise.unsteadiness)
        number = len(log_composed_NJ)
        imagined_NJ = log_composed_NJ + self.sample(number, rows_J, scale, rows_J) + noise_J * draws_NJ
        inverse_JJ = np.linalg.inv(around + self.covariance(rows_J, rows_J, scale))
        return Correction(
            self, rows_J, scale, centred_NJ, (log_tokens_J - imagined_NJ) @ inverse_JJ, distance_J @ inverse_JJ
        )

    @staticmethod
    def _noise(seeds_J: Sequence[Sequence[int]], number: int) -> Floats:
        """Return standard normal draws, each column of which has a seed of its own, shape (N, J)."""
        draws = [np.random.default_rng(list(seed)).standard_normal(number) for seed in seeds_J]
        return np.stack(draws, axis=1) if draws else np.empty((number, 0))


def _same_kernels(candidates: Sequence[Candidate]) -> Ints:
    """Return, for each candidate, the first that runs the same kernels: itself, unless one of them has CUDA graphs."""
    place: dict[Candidate, int] = {}
    firsts = []
    for i, candidate in enumerate(candidates):
        plain = candidate
        if candidate.execution is not None:
            plain = candidate.model_copy(update={"execution": candidate.execution.captured})
        firsts.append(place.setdefault(plain, i))
    return np.array(firsts, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Correction:
    """The shift of the logarithm of any candidate's throughput by the whole models of `rows_J`.

    `scale` multiplies the standard deviations of all parts of the error. `weights_NJ` are the distances of the whole
    models from each sample, times the inverse of their covariance. `weights_J` are those from the mean.
    """

    errors: CompositionErrors
    rows_J: Ints  # noqa: N815 - axes are in names
    scale: float
    centred_NJ: Floats  # noqa: N815 - axes are in names
    weights_NJ: Floats  # noqa: N815 - axes are in names
    weights_J: Floats  # noqa: N815 - axes are in names

    def mean(self, rows: Ints, log_composed_NA: Floats) -> Floats:
        """Return the shifts of the expected throughput of `rows`, shape (A,)."""
        return np.asarray((self._around(log_composed_NA) + self._errors_with(rows)) @ self.weights_J)

    def samples(self, rows: Ints, log_composed_NA: Floats) -> tuple[Floats, Floats]:
        """Return the shifts of the samples of `rows`, each of shape (N, A): of the components, and of the error."""
        weights_NJ = self.weights_NJ[: len(log_composed_NA)]
        return np.asarray(weights_NJ @ self._around(log_composed_NA).T), np.asarray(
            weights_NJ @ self._errors_with(rows).T
        )

    def expected_errors(self, rows: Ints) -> Floats:
        """Return the part of `mean` that belongs to the error, shape (A,)."""
        return np.asarray(self._errors_with(rows) @ self.weights_J)

    def _errors_with(self, rows: Ints) -> Floats:
        return self.errors.covariance(rows, self.rows_J, self.scale)

    def _around(self, log_composed_NA: Floats) -> Floats:
        """Return the covariance of composed throughputs with those that were run whole, shape (A, J)."""
        number = len(log_composed_NA)
        centred_NA = log_composed_NA - log_composed_NA.mean(axis=0)
        return np.asarray(centred_NA.T @ self.centred_NJ[:number] / (number - 1))
