from __future__ import annotations

import pytest

from benchmarks.context_parallel import HEAD_SIZE, NUM_HEADS, compare, flops_of


def test_shares_of_the_ideal() -> None:
    """Two devices that need 2 and 4 s for the whole do it together in 4/3 s."""
    flops = flops_of(128)
    assert flops == 7 * 128**2 * NUM_HEADS * HEAD_SIZE
    timed = {
        "alone": {"seconds": 4.0, "seconds_by_rank": [2.0, 4.0]},
        "ring": {"seconds": 3.2, "seconds_by_rank": [2.0, 3.2]},
        "striped": {"seconds": 1.6, "seconds_by_rank": [1.6, 1.6]},
    }
    assert compare(timed, flops, 2) == pytest.approx(4 / 3)
    assert timed["striped"]["share_of_ideal"] == pytest.approx(5 / 6)
    assert timed["striped"]["speed_over_ring"] == pytest.approx(2)
    assert timed["alone"]["flops_per_second_and_device"] == flops / 4
    assert timed["ring"]["flops_per_second_and_device"] == flops / 3.2 / 2
