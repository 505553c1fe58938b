"""Optuna's own samplers on the same space, by objective value alone, with the same component cache."""

from __future__ import annotations

import warnings

import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import Trial

from benchmarks.replay.bench import TrialBench
from benchmarks.replay.ground_truth import GroundTruth
from explorer.spec.candidate import Candidate, Recompute

NUM_TRIALS = 50
"""They have no rule to stop by: this many, as DeepSpeed's model-based tuner takes by default."""
MAX_SUGGESTIONS = 20 * NUM_TRIALS
"""Combinations that are no candidates (a tile that does not divide the micro-batch) are told so, and cost nothing."""


def random(bench: TrialBench, seed: int) -> Candidate | None:
    """Uniform over the space."""
    return _optimize(bench, RandomSampler(seed=seed))


def tpe(bench: TrialBench, seed: int) -> Candidate | None:
    """Tree-structured Parzen estimator, Optuna's default."""
    return _optimize(bench, TPESampler(seed=seed))


def gaussian_process(bench: TrialBench, seed: int) -> Candidate | None:
    """Gaussian process with logEI."""
    return _optimize(bench, GPSampler(seed=seed))


def _optimize(bench: TrialBench, sampler: BaseSampler) -> Candidate | None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a sampler is experimental
        study = optuna.create_study(direction="maximize", sampler=sampler)
        dimensions = _Dimensions(bench.truth)
        for _ in range(MAX_SUGGESTIONS):
            if len(bench.tries) >= min(NUM_TRIALS, int(bench.truth.legal_C.sum())):
                break
            _step(bench, study, dimensions)
    return bench.fastest()


def _step(bench: TrialBench, study: Study, dimensions: _Dimensions) -> None:
    trial = study.ask()
    row = bench.row(dimensions.suggest(trial))
    tokens = bench.run(row) if row is not None else None
    study.tell(trial, tokens or 0.0)


class _Dimensions:
    """Sizes and tiles in their order, the rest as categories."""

    def __init__(self, truth: GroundTruth) -> None:
        candidates = truth.prune.legal.candidates
        self._groups = truth.request.model.query_groups
        self._sizes = truth.request.micro_batch_sizes
        self._tiles = sorted({c.bta_tile or 0 for c in candidates})
        found = {c.recompute for c in candidates}
        self._policies = [policy.value for policy in Recompute if policy in found]
        self._attention = sorted({c.attention_backend for c in candidates})
        self._experts = sorted({c.expert_backend for c in candidates if c.expert_backend is not None})

    def suggest(self, trial: Trial) -> Candidate:
        """A point of the grid; it may be no legal candidate."""
        experts = str(trial.suggest_categorical("expert_backend", self._experts)) if self._experts else None
        return Candidate(
            micro_batch_size=self._sizes[trial.suggest_int("micro_batch_index", 0, len(self._sizes) - 1)],
            bta_tile=self._tiles[trial.suggest_int("tile_index", 0, len(self._tiles) - 1)] or None,
            recompute=Recompute(trial.suggest_categorical("recompute", self._policies)),
            attention_backend=str(trial.suggest_categorical("attention_backend", self._attention)),
            expert_backend=experts,
            num_query_groups=self._groups,
        )
