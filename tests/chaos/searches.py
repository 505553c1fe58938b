"""What the clients of a campaign submit: small searches, each of a seed and of a recorded table."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

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


def seeds_of(tables: Collection[Path]) -> list[int]:
    """Return the seeds that belong to some tables."""
    return [seed for seed, table in TABLE_OF.items() if table in tables]


def search_of(seed: int, num_trials: int) -> dict[str, Any]:
    """Return the request of a seed."""
    table = TABLE_OF[seed]
    return {**document_of(seed, num_trials, table), "micro_batch_size": list(SIZES_AND_SEEDS[table][0])}
