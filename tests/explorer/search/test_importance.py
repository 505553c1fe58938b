"""The importance of dimensions, on candidates whose speeds are known."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.search.importance import importance_of_dimensions


def point(size: int, tile: int | None) -> Candidate:
    return Candidate(micro_batch_size=size, bta_tile=tile, attention_backend="flash", num_query_groups=1)


def test_a_share_is_the_variance_that_a_dimension_explains_by_itself() -> None:
    points = [point(size, tile) for size in (1, 2) for tile in (None, 1)]
    log_C = np.array([0.0, 1.0, 2.0, 3.0])  # 2 for the size and 1 for the tile: variances 1 and 1/4
    assert importance_of_dimensions(points, np.exp(log_C)) == pytest.approx({"micro_batch_size": 0.8, "bta_tile": 0.2})
    log_C = np.array([1.0, 0.0, 0.0, 1.0])  # only together
    assert importance_of_dimensions(points, np.exp(log_C)) == pytest.approx({"micro_batch_size": 0, "bta_tile": 0})


def test_a_group_counts_by_its_size_and_what_does_not_vary_is_left_out() -> None:
    points = [point(1, None), point(2, None), point(2, 1), point(2, 2)]
    shares = importance_of_dimensions(points, np.exp([3.0, 0.0, 0.0, 0.0]))
    assert list(shares) == ["micro_batch_size", "bta_tile"]
    assert shares == pytest.approx({"micro_batch_size": 1.0, "bta_tile": 1 / 3})
    assert importance_of_dimensions(points, np.ones(4)) == importance_of_dimensions([], np.ones(0)) == {}
