"""The search against other strategies, and its confidence against the truth, on recorded tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.readme.results import table
from benchmarks.replay.calibration import CONFIDENT
from benchmarks.replay.runs import OURS

_TITLES = {
    OURS: "`bexp`",
    "tpe": "Optuna's TPE",
    "gp": "Optuna's GP",
    "random": "random",
    "powers of two": "powers of two (Lightning)",
    "halving from the top": "halving from the top (Accelerate)",
    "largest that fits": "largest that fits (Composer)",
    "deepspeed fast": "DeepSpeed's fast mode",
    "exhaustive": "exhaustive",
}


def strategies(results: dict[str, Any], name: str) -> str:
    """A line a strategy over all tables; below, a line a table."""
    summary = results["summary"]
    lines = [
        [
            _TITLES.get(strategy, strategy),
            " / ".join(percent(found["regret"][of]) for of in ("median", "p95", "max")),
            f"{found['trials']['median']:.0f}",
            f"{found['seconds']['median']:.1f} s",
            percent(found["share_of_exhaustive"]["median"]),
            f"{found['out_of_memory']['median']:.0f}",
            str(found["num_runs"]),
        ]
        for strategy, found in summary["strategies"].items()
    ]
    columns = ["strategy", "regret: median / p95 / max", "trials", "device time", "of exhaustive", "OOMs", "runs"]
    return "".join(
        [
            f"Searches replayed on {recorded_tables(results)}: what the chosen candidate loses against the best, and "
            "what finding it cost, medians over all runs. Equal components are measured once, whoever asks; the "
            f"whole-model check is apart (`python -m benchmarks.replay ... --out benchmarks/results/{name}.json`):\n\n",
            table(columns, lines),
            _by_table(results),
            f"\n{replayed_on(results)}\n",
        ]
    )


def reliability(results: dict[str, Any], name: str) -> str:
    """Said and true shares by confidence, with what is computed from them."""
    found = results["summary"]["calibration"]
    if found is None:
        return ""
    lines = [
        [
            f"{row['from']:.0f} to {row['to']:.0f}",
            f"{row['num_lines']:.0f}",
            percent(row["mean_forecast"]),
            percent(row["share_true"]),
        ]
        for row in found["reliability"]
    ]
    say = [
        "What the confidence of a BEXP202 line says, and how often the candidate was within the tolerance, over every "
        f"line of every run of `{OURS}` (`python -m benchmarks.replay ... --out benchmarks/results/{name}.json`):\n\n",
        table(["confidence", "lines", "said", "true"], lines),
        f"\nOver all tables: {_calibration(found)} ",
    ]
    if whole := results["summary"]["calibration_of_whole_models"]:
        number = whole["num_tables"]
        say.append(f"On tables whose every candidate was timed whole ({number}): {_calibration(whole)} ")
    say.append(f"Intervals are 95%, bootstrapped over tables. {replayed_on(results)}\n")
    return "".join(say)


def _by_table(results: dict[str, Any]) -> str:
    """What `bexp` does on each table."""
    by_table = results["summary"]["tables"]
    lines = []
    for name, about in results["tables"].items():
        ours = by_table.get(name, {}).get(OURS)
        if ours is None:
            continue
        lines.append(
            [
                name,
                f"{about['num_candidates']}",
                f"{about['num_within_tolerance']}",
                f"{about['num_whole_models']}",
                " / ".join(percent(ours["regret"][of]) for of in ("median", "p95", "max")),
                f"{ours['trials']['median']:.0f}",
                f"{ours['seconds']['median']:.1f} s",
                percent(ours["share_of_exhaustive"]["median"]),
            ]
        )
    if not lines:
        return ""
    columns = ["table", "candidates", "within tolerance", "timed whole", "regret: median / p95 / max", "trials"]
    return f"\n`{OURS}` by table:\n\n" + table([*columns, "device time", "of exhaustive"], lines)


def _calibration(found: dict[str, Any]) -> str:
    return (
        f"expected calibration error {found['expected_calibration_error']:.3f}"
        f"{interval(found, 'expected_calibration_error')}, Brier score {found['brier']:.3f} "
        f"({found['brier_constant']:.3f} for a constant forecaster); of {found['num_confident_lines']:.0f} lines with "
        f"confidence {CONFIDENT} or more, {percent(found['confident_share_true'])}"
        f"{interval(found, 'confident_share_true', percent)} within the tolerance."
    )


def interval(calibration: dict[str, Any], key: str, text: Callable[[float], str] = "{:.3f}".format) -> str:
    """` (0.010 to 0.050)`, or nothing with a single table."""
    bounds = calibration["intervals_95"].get(key)
    return f" ({text(bounds[0])} to {text(bounds[1])})" if bounds else ""


def recorded_tables(results: dict[str, Any]) -> str:
    """`9 tables recorded on NVIDIA H200, ...`."""
    devices = sorted({str(about["device"]) for about in results["tables"].values()})
    return f"{len(results['tables'])} tables recorded on {' and '.join(devices)}"


def replayed_on(results: dict[str, Any]) -> str:
    """The day and the number of seeds."""
    environment, seeds = results["environment"], results["seeds"]
    fewer = [f"{_TITLES.get(name, name)} {number}" for name, number in seeds.items() if number != max(seeds.values())]
    note = f" ({', '.join(fewer)})" if fewer else ""
    return f"{max(seeds.values())} seeds a table{note}, replayed on {environment['date'][:10]}."


def percent(share: float | None) -> str:
    """`1.2%`, or a dash for none."""
    return "-" if share is None else f"{100 * share:.1f}%"
