"""Compares the product's search with several trials in flight and with one, in virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.runs import Run, read_truth, run_search

ELAPSED_SHARE = 0.4
"""Of the time with one trial in flight: the goal for four."""
REGRET_ROOM = 0.0005  # mean regrets that differ by at most this count as the same: a twentieth of a tolerance of 1%


def compare_in_flight(paths: Sequence[Path], in_flight: int, seeds: int, processes: int) -> dict[str, Any]:
    """Figures by table and over all of them; equal seeds see equal measurements.

    `share` is elapsed seconds over those of the same seed with one in flight, whole-model checks apart, which are run
    alone either way; `busy_share` compares the seconds of all devices together.
    """
    pairs = list(_pairs(paths, in_flight, seeds, processes))
    names = list(dict.fromkeys(alone.table for alone, _ in pairs))
    overall = _figures(pairs)
    share, before, after = overall["share_of_totals"], overall["regret_mean_alone"], overall["regret_mean"]
    return {
        "in_flight": in_flight,
        "num_seeds": seeds,
        "by_table": {name: _figures([pair for pair in pairs if pair[0].table == name]) for name in names},
        "all_tables": overall,
        "goals": {
            "elapsed_share": {"found": share, "met": share <= ELAPSED_SHARE},
            "regret_as_with_one": {"found": [before, after], "met": after <= before + REGRET_ROOM},
        },
    }


def print_in_flight(found: Mapping[str, Any]) -> None:
    """A line for each table, one for all, and the goals."""
    for name, figures in (*found["by_table"].items(), ("all tables", found["all_tables"])):
        print(
            f"{name:<22} elapsed {figures['elapsed_seconds_mean_alone']:6.1f} -> "
            f"{figures['elapsed_seconds_mean']:5.1f} s ({100 * figures['share_of_totals']:.0f}%, "
            f"median {100 * figures['share_median']:.0f}%); "
            f"busy {100 * figures['busy_share']:.0f}%; trials {figures['trials_mean_alone']:.1f} -> "
            f"{figures['trials_mean']:.1f}; OOM {figures['out_of_memory_mean_alone']:.1f} -> "
            f"{figures['out_of_memory_mean']:.1f}; regret mean {100 * figures['regret_mean_alone']:.3f}% -> "
            f"{100 * figures['regret_mean']:.3f}%, p95 {100 * figures['regret_p95_alone']:.2f}% -> "
            f"{100 * figures['regret_p95']:.2f}%"
        )
    for goal, outcome in found["goals"].items():
        print(f"{'met   ' if outcome['met'] else 'MISSED'} {goal}: {outcome['found']}")


def _figures(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    alone, several = [one for one, _ in pairs], [other for _, other in pairs]
    shares = [b.elapsed_seconds / a.elapsed_seconds for a, b in pairs]
    found: dict[str, Any] = {
        "num_runs": len(pairs),
        "share_of_totals": sum(r.elapsed_seconds for r in several) / sum(r.elapsed_seconds for r in alone),
        "share_median": statistics.median(shares),
        "share_p95": float(np.percentile(shares, 95)),
        "busy_share": sum(r.seconds for r in several) / sum(r.seconds for r in alone),
    }
    for runs, suffix in ((alone, "_alone"), (several, "")):
        regrets = [r.regret for r in runs]
        found |= {
            f"elapsed_seconds_mean{suffix}": statistics.fmean(r.elapsed_seconds for r in runs),
            f"regret_mean{suffix}": statistics.fmean(regrets),
            f"regret_p95{suffix}": float(np.percentile(regrets, 95)),
            f"regret_max{suffix}": max(regrets),
            f"trials_mean{suffix}": statistics.fmean(r.num_trials for r in runs),
            f"out_of_memory_mean{suffix}": statistics.fmean(r.num_out_of_memory for r in runs),
            f"wall_seconds_mean{suffix}": statistics.fmean(r.wall_seconds for r in runs),
        }
    return found


def _pairs(paths: Sequence[Path], in_flight: int, seeds: int, processes: int) -> Iterator[tuple[Run, Run]]:
    tasks = [
        (path, in_flight, tuple(range(first, min(first + 10, seeds))))
        for path in paths
        for first in range(0, seeds, 10)
    ]
    if processes == 1:
        for task in tasks:
            yield from _run_task(*task)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for pairs in pool.map(_run_task, *zip(*tasks, strict=True)):
            yield from pairs


def _run_task(path: Path, in_flight: int, seeds: tuple[int, ...]) -> list[tuple[Run, Run]]:
    truth = read_truth(path)
    return [(run_search(truth, seed), run_search(truth, seed, in_flight)) for seed in seeds]
