"""Samples that are computed in blocks of candidates."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.surrogate.blocks import BLOCK_ROWS, sample_in_blocks


@pytest.mark.parametrize("number", [0, 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS])
def test_blocks_give_the_same_samples_in_the_same_order(number: int) -> None:
    rows = np.random.default_rng(0).permutation(number)
    asked: list[int] = []

    def sample(some: np.ndarray) -> np.ndarray:
        asked.append(some.size)
        return np.asarray(np.arange(3.0)[:, None] + 10 * some)

    assert np.array_equal(sample_in_blocks(sample, rows), np.arange(3.0)[:, None] + 10 * rows)
    assert sum(asked) == number
    assert max(asked) <= BLOCK_ROWS
