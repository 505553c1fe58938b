"""Optuna's own samplers on the same space, by objective value alone, with the same component cache."""

from __future__ import annotations

import warnings

import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import Trial

from benchmarks.replay.bench import TrialBench
from benchmarks.replay.ground_truth import GroundTruth
from explorer.candidates import Candidate, Recompute

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
        for _ in range(MAX_SUGGESTIONS):
            if len(bench.tries) >= min(NUM_TRIALS, int(bench.truth.legal_C.sum())):
                break
            _step(bench, study)
    return bench.fastest()


def _step(bench: TrialBench, study: Study) -> None:
    trial = study.ask()
    candidate = _suggest(trial, bench.truth)
    row = bench.row(candidate)
    tokens = bench.run(row) if row is not None else None
    study.tell(trial, tokens or 0.0)


def _suggest(trial: Trial, truth: GroundTruth) -> Candidate:
    """Sizes and tiles in their order, the rest as categories."""
    request = truth.request
    candidates = truth.survey.legal.candidates
    sizes = request.micro_batch_sizes
    tiles = sorted({c.bta_tile or 0 for c in candidates})
    policies = [p.value for p in Recompute if any(c.recompute is p for c in candidates)]
    attention = sorted({c.attention_backend for c in candidates})
    experts = sorted({c.expert_backend for c in candidates if c.expert_backend is not None})
    return Candidate(
        micro_batch_size=sizes[trial.suggest_int("micro_batch_index", 0, len(sizes) - 1)],
        bta_tile=tiles[trial.suggest_int("tile_index", 0, len(tiles) - 1)] or None,
        recompute=Recompute(trial.suggest_categorical("recompute", policies)),
        attention_backend=str(trial.suggest_categorical("attention_backend", attention)),
        expert_backend=str(trial.suggest_categorical("expert_backend", experts)) if experts else None,
        num_query_groups=request.model.query_groups,
    )
