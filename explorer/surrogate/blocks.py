"""Computes values of many candidates in blocks, so that intermediate results stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from bexp.explorer.cost.composition import Ints

Value = TypeVar("Value", bound=np.generic)

BLOCK_ROWS = 512
"""With a hundred samples, an array over a block takes half a megabyte."""


def sample_in_blocks(sample: Callable[[Ints], npt.NDArray[Value]], rows: Ints) -> npt.NDArray[Value]:
    """Return `sample(rows)`, shape (N, A) or (A,), where each column depends on its own row alone."""
    if rows.size <= BLOCK_ROWS:
        return sample(rows)
    blocks = [sample(rows[start : start + BLOCK_ROWS]) for start in range(0, rows.size, BLOCK_ROWS)]
    return np.concatenate(blocks, axis=-1)
