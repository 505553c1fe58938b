"""What the table of real trainers runs, and what it makes of the runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.real_trainers import accumulates, compiled_runs, describe, ratio
from benchmarks.trainer_runs import _sweep, batch_seconds, micro_steps_of


def run(size: int, speed: float | None, *, checkpointing: bool = False) -> dict[str, Any]:
    reached = {"error": "out of memory"} if speed is None else {"tokens_per_second": speed}
    return {"micro_batch_size": size, "gradient_checkpointing": checkpointing, **reached}


def swept(speed: dict[tuple[int, bool], float], batch_size: int | None = None) -> list[tuple[int, bool]]:
    """The runs of a sweep where each run has this speed, and others have no memory."""
    found: list[dict[str, Any]] = []
    for asked in _sweep(found, batch_size):
        size, checkpointing = asked["micro_batch_size"], asked["gradient_checkpointing"]
        found.append(run(size, speed.get((size, checkpointing)), checkpointing=checkpointing))
    return [(one["micro_batch_size"], one["gradient_checkpointing"]) for one in found]


def test_a_sweep_tries_checkpointing_from_the_largest_size_that_fits_without() -> None:
    speed = {(1, False): 10.0, (2, False): 12.0, (2, True): 9.0, (3, True): 10.0, (4, True): 11.0}
    assert swept(speed) == [(1, False), (2, False), (3, False), (2, True), (3, True), (4, True), (6, True)]


def test_a_sweep_ends_when_throughput_has_fallen_twice() -> None:
    speed = {(size, checkpointing): 1 / size for size in (1, 2, 3, 4, 6) for checkpointing in (False, True)}
    assert swept(speed) == [(1, False), (2, False), (3, False), (3, True), (4, True), (6, True)]


def test_a_sweep_ends_at_the_batch() -> None:
    speed = {(size, checkpointing): float(size) for size in (1, 2, 3, 4, 6) for checkpointing in (False, True)}
    assert swept(speed, 4) == [(1, False), (2, False), (3, False), (4, False), (4, True)]


def test_compiled_stock_runs_start_at_the_best_size_without_checkpointing() -> None:
    sweep = [run(3, 10.0), run(4, 11.0), run(6, None), run(8, 99.0, checkpointing=True)]
    assert [one["micro_batch_size"] for one in compiled_runs(sweep)] == [4, 6, 8]
    assert all(one["torch_compile"] for one in compiled_runs(sweep))


def test_a_row_is_held_against_the_best_run_of_the_sweep() -> None:
    row = {"model": "m", "fields": [], "sweep": [run(3, 10.0), run(4, 12.5)], "exploration": {"wall_seconds": 61.2}}
    assert ratio({**row, "recommended": [run(4, 15.0)]}) == 1.2
    assert ratio({**row, "recommended": [run(4, None)]}) is None
    assert describe({**row, "recommended": [run(4, 15.0)]}) == "m: 1.200x the best of the sweep, answered after 61 s"
    assert "failed" in describe({**row, "recommended": []})


def test_a_step_of_the_batch_counts_its_update_once() -> None:
    cold, warm = [9.0, 9.0, 9.0], [1.0, 2.0, 5.0]
    assert batch_seconds([cold, cold, warm, warm], 4, 64) == pytest.approx(1.0 + 2.0 * 14 + 5.0)
    assert batch_seconds([cold, cold, warm, warm], 6, 64) == pytest.approx(1.0 + 2.0 * (64 / 6 - 2) + 5.0)


def test_a_step_of_two_micro_steps_repeats_the_first() -> None:
    assert batch_seconds([[9.0, 9.0]] * 3 + [[1.0, 3.0]], 24, 64) == pytest.approx(3.0 + 1.0 * 64 / 24 - 1.0)


def test_a_run_without_a_batch_is_a_step_a_micro_batch() -> None:
    assert micro_steps_of(4, None) == 1
    assert batch_seconds([[9.0]] * 5 + [[2.0], [4.0]], 4, None) == 3.0


def test_no_more_micro_steps_are_accumulated_than_the_batch_has() -> None:
    assert [micro_steps_of(size, 64) for size in (1, 16, 24, 32, 48, 96)] == [3, 3, 2, 2, 1, 1]


def test_runs_at_another_batch_are_made_again() -> None:
    assert accumulates([{"batch_size": 64}], 64)
    assert not accumulates([{"batch_size": 64}, {}], 64)
    assert not accumulates(None, 64)
