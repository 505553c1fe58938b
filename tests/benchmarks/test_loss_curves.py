from __future__ import annotations

import pytest

from benchmarks.loss_curves import compare

STEPS = 60
FIRST = [4.0 - 0.02 * step for step in range(STEPS)]
SECOND = [loss + 0.05 * (1 if step % 20 < 10 else -1) for step, loss in enumerate(FIRST)]


@pytest.mark.parametrize(
    ("patched", "within"),
    [
        (FIRST, True),
        ([loss + 0.04 for loss in FIRST], True),
        ([loss + 0.06 for loss in FIRST], False),
        ([loss + (0.1 if step >= 50 else 0.0) for step, loss in enumerate(FIRST)], False),
        ([loss + (0.1 if step < 10 else 0.0) for step, loss in enumerate(FIRST)], True),
        ([float("nan")] * STEPS, False),
    ],
)
def test_a_curve_is_within_the_spread_of_the_seeds_on_average_and_at_its_end(
    patched: list[float], within: bool
) -> None:
    found = compare(FIRST, SECOND, patched)
    assert found["within"] is within
    assert (found["spread"], found["largest_spread"]) == (pytest.approx(0.05), pytest.approx(0.05))
