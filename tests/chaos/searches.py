"""What the clients of a campaign submit: small searches, each of a seed, whose trials a table answers or a profiler."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any

from bexp.explorer.model.model import DType, ModelSpec
from tests.chaos.clients import document_of
from tests.chaos.processes import TABLES

SIZES_AND_SEEDS = dict(
    zip(
        TABLES,
        (
            ((1, 4, 6), (0, 4, 12, 16, 20, 28, 36, 40)),
            ((1, 8, 64), (1, 17, 21, 41, 49, 53, 57)),
            ((2, 6, 16), (2, 6, 10, 18, 26, 30, 38, 42)),
            ((4, 16, 64), (3, 7, 11, 15, 23, 27, 31, 35, 39, 43)),
        ),
        strict=True,
    )
)
"""By table. A search takes 3 to 14 trials and at most a quarter of a second of processor time. Its last message has the
figures of its answer, with each of these seeds and at most 24 trials, as the check of a campaign's end wants it.
"""
TABLE_OF = {seed: table for table, (_, seeds) in SIZES_AND_SEEDS.items() for seed in seeds}

SMALL_MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    vocab_size=512,
    seq_length=64,
    dtype=DType.FLOAT32,
)
MEASURED_SEEDS = range(100, 108)
"""Of searches that a profiler process measures on this machine's processor."""
MEASURED_SHARE = 0.1
MEASURED = {
    "model": SMALL_MODEL.model_dump(mode="json"),
    "micro_batch_size": [1, 2],
    "bta": {"enable": False},
    "attention_backends": ["math"],
    "device_kind": "cpu",
    "verify": False,
    "fresh": True,
    "budget": {"max_trials": 4, "confidence_target": 99, "max_seconds": 3000, "trial_timeout_seconds": 60},
}


def draw_seed(rng: Random, tables: Collection[Path], *, measures: bool) -> int:
    """Return a seed; where a worker measures, one in ten is of a search that it measures."""
    return rng.choice(MEASURED_SEEDS if measures and rng.random() < MEASURED_SHARE else seeds_of(tables))


def seeds_of(tables: Collection[Path]) -> list[int]:
    """Return the seeds that belong to some tables."""
    return [seed for seed, table in TABLE_OF.items() if table in tables]


def search_of(seed: int, num_trials: int) -> dict[str, Any]:
    """Return the request of a seed."""
    if seed in MEASURED_SEEDS:
        return {**MEASURED, "seed": seed}
    table = TABLE_OF[seed]
    sizes = list(SIZES_AND_SEEDS[table][0])
    return {**document_of(seed, num_trials, table), "micro_batch_size": sizes, "device_kind": "cuda"}
