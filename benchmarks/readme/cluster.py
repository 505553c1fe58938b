"""Several trials at once: in replay, and on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.readme.replay import percent
from benchmarks.readme.results import exists, load, table

Row = list[str]


def cluster() -> str:
    """A line a goal that was measured; nothing where no results exist."""
    sources: tuple[tuple[str, Callable[[dict[str, Any]], list[Row]]], ...] = (
        ("replay-in-flight", of_replay),
        ("cpu-cluster", of_cluster),
    )
    rows = [row for name, render in sources if exists(name) for row in render(load(name))]
    return table(["what", "goal", "measured"], rows) if rows else ""


def of_replay(results: dict[str, Any]) -> list[Row]:
    """Regret and elapsed time with several trials in flight, on recorded tables."""
    found, goals = results["all_tables"], results["goals"]
    over = f"over {found['num_runs']} runs on {len(results['tables'])} tables"
    return [
        [
            f"mean regret with {results['in_flight']} trials in flight",
            "as with one",
            f"{_word(goals['regret_as_with_one']['met'])}: {found['regret_mean']:.2%} against "
            f"{found['regret_mean_alone']:.2%} {over}",
        ],
        [
            "device time from the first trial to the last, as a share of that with one in flight",
            "<= 40%",
            f"{_word(goals['elapsed_share']['met'])}: {percent(found['share_of_totals'])}, "
            f"{found['elapsed_seconds_mean']:.1f} instead of {found['elapsed_seconds_mean_alone']:.1f} s in the mean; "
            f"the devices are busy for {percent(found['busy_share'])} of the time that one is alone",
        ],
    ]


def of_cluster(results: dict[str, Any]) -> list[Row]:
    """What a second worker brings through Ray, and what Ray costs a trial."""
    goals = results["goals"]
    cpus = results["environment"]["num_cpus"]
    return [
        [
            f"trials a second through Ray, two workers against one, CPU trials on {cpus} cores",
            ">= 1.7x",
            f"{_word(goals['speed_up']['met'])}: {goals['speed_up']['found']:.2f}x ({results['num_trials']} trials)",
        ],
        [
            "overhead a trial through Ray",
            "<= 100 ms",
            f"{_word(goals['overhead_seconds']['met'])}: {1e3 * goals['overhead_seconds']['found']:.1f} ms",
        ],
    ]


def _word(met: bool) -> str:
    return "reached" if met else "missed"
