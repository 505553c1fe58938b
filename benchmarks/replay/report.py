"""Prints the comparison for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def print_summary(results: Mapping[str, Any]) -> None:
    """Tables, strategies, calibration and goals, on stdout."""
    summary = results["summary"]
    for name, table in results["tables"].items():
        print(
            f"{name}: {table['num_candidates']} candidates ({table['num_feasible']} feasible, "
            f"{table['num_within_tolerance']} within tolerance), {table['num_components']} components, "
            f"{table['num_whole_models']} whole models, exhaustive {table['exhaustive_seconds']:.0f} s"
        )
        for strategy, figures in summary["tables"].get(name, {}).items():
            print("  " + _row(strategy, figures))
    print("all tables")
    for strategy, figures in summary["strategies"].items():
        print("  " + _row(strategy, figures))
    for what, calibration in (
        ("calibration", summary["calibration"]),
        ("of tables timed whole", summary["calibration_of_whole_models"]),
    ):
        if calibration is None:
            continue
        print(
            f"{what}: error {calibration['expected_calibration_error']:.3f}, Brier {calibration['brier']:.3f} "
            f"(constant {calibration['brier_constant']:.3f}), of {calibration['num_confident_lines']:.0f} lines with "
            f"confidence >= 90 {_percent(calibration['confident_share_true'])} within tolerance; "
            f"95% intervals over tables: {calibration['intervals_95']}"
        )
        for row in calibration["reliability"]:
            print(
                f"  {row['from']:>3.0f}-{row['to']:<3.0f} {row['num_lines']:>7.0f} lines, "
                f"said {_percent(row['mean_forecast'])}, true {_percent(row['share_true'])}"
            )
    for goal, outcome in (summary["goals"] or {}).items():
        print(f"{'met   ' if outcome['met'] else 'MISSED'} {goal}: {outcome['found']}")
    print(f"{results['wall_seconds']:.0f} s")


def _row(strategy: str, figures: Mapping[str, Any]) -> str:
    regret, share = figures["regret"], figures["share_of_exhaustive"]
    at_ours, confident = figures["regret_at_our_seconds"], figures["seconds_to_confidence_90_median"]
    return (
        f"{strategy:<21} regret {_percent(regret['median'])} p95 {_percent(regret['p95'])} max "
        f"{_percent(regret['max'])}; trials {figures['trials']['median']:>4.0f}; "
        f"{figures['seconds']['median']:>7.1f} s ({_percent(share['median'])} of exhaustive); "
        f"OOM {figures['out_of_memory']['median']:.0f}"
        + (f"; confident after {confident:.1f} s" if confident is not None else "")
        + (f"; at our seconds {_percent(at_ours['median'])} p95 {_percent(at_ours['p95'])}" if at_ours else "")
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
