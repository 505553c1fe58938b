"""The search against other strategies, and its confidence against the truth, on recorded tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks.docs.results import Columns, Row, facts, goal_table, percent, table
from benchmarks.replay.runs import OURS
from benchmarks.replay.summary import by_table_rivals
from benchmarks.unseen.executions import MOST_TIMES

TITLES = {
    OURS: "`bexp`",
    "tpe": "Optuna's TPE",
    "gp": "Optuna's GP",
    "powers of two": "powers of two (Lightning)",
    "backing off from the top": "backing off by 0.9 from the top (Accelerate)",
    "largest that fits": "largest that fits (Composer)",
    "deepspeed fast": "DeepSpeed's fast mode",
}
COSTS: Columns = {
    "regret: median / p95 / max": lambda row: regret(row[1]),
    "trials": lambda row: f"{row[1]['trials']['median']:.0f}",
    "device time": lambda row: f"{row[1]['seconds']['median']:.1f} s",
    "of exhaustive": lambda row: percent(row[1]["share_of_exhaustive"]["median"]),
}

DECILES: Columns = {
    "confidence": lambda row: f"{row['from']:.0f} to {row['to']:.0f}",
    "lines": lambda row: f"{row['num_lines']:.0f}",
    "said": lambda row: percent(row["mean_forecast"]),
    "true": lambda row: percent(row["share_true"]),
}
UNSEEN_P95, UNSEEN_MAX, UNSEEN_TRUE, UNSEEN_ERROR, UNSEEN_FAILS = 0.008, 0.03, 0.92, 0.04, 0.002


def strategies(results: Row) -> str:
    """A line a strategy over all tables; below, a line a table."""
    summary, tables = results["summary"], results["tables"]
    overall: Columns = {"strategy": lambda row: TITLES.get(row[0], row[0]), **COSTS}
    overall = {
        **overall,
        "OOMs": lambda row: f"{row[1]['out_of_memory']['median']:.0f}",
        "runs": lambda row: row[1]["num_runs"],
    }
    about = {
        "table": lambda row: row[0],
        "candidates": lambda row: tables[row[0]]["num_candidates"],
        "within tolerance": lambda row: tables[row[0]]["num_within_tolerance"],
        "timed whole": lambda row: tables[row[0]]["num_whole_models"],
    }
    ours = [(name, found[OURS]) for name, found in summary["tables"].items() if OURS in found]
    return (
        table(summary["strategies"].items(), overall)
        + f"\n`{OURS}` by table:\n\n"
        + table(ours, {**about, **COSTS})
        + replayed_on(results)
    )


def rivals(results: Row) -> str:
    """By table: the strategies that took less device time with equal or better regret."""
    found = by_table_rivals(results["summary"]["tables"])
    columns = {
        "table": lambda name: name,
        "cheaper, with equal or better regret": lambda name: ", ".join(TITLES.get(r, r) for r in found[name]) or "none",
    }
    return table(found, columns)


def reliability(results: Row) -> str:
    """Said and true shares by confidence, with what is computed from them."""
    summary = results["summary"]
    if summary["calibration"] is None:
        return ""
    rows: list[tuple[str, Any]] = []
    for where, found in (
        ("all tables", summary["calibration"]),
        ("tables timed whole", summary["calibration_of_whole_models"]),
    ):
        if found is None:
            continue
        rows += [
            (
                f"{where}: expected calibration error",
                with_interval(found, "expected_calibration_error", "{:.3f}".format),
            ),
            (
                f"{where}: Brier score",
                f"{found['brier']:.3f} ({found['brier_constant']:.3f} for a constant forecaster)",
            ),
            (f"{where}: lines of 90 and more that are true", with_interval(found, "confident_share_true", percent)),
        ]
    return table(summary["calibration"]["reliability"], DECILES) + "\n" + facts(rows) + replayed_on(results)


def unseen(results: Row) -> str:
    """Regret and reliability on devices that are drawn from seeds, beside what is wanted."""
    calibration, (first, end) = results["calibration"], results["seed_range"]
    error = calibration["expected_calibration_error"]
    true, fails = calibration["confident_share_true"], results["share_failing_whole"]
    # The upper end of a 95% interval; for none of n it is 3 / n (Hanley and Lippman-Hand, 1983).
    most = fails + 3.0 * max(math.sqrt(fails / (end - first)) * (2 / 3), 1.0 / (end - first))
    goal = f"0% / {percent(UNSEEN_P95)} / {percent(UNSEEN_MAX)}"
    rows = [
        ("regret: median / p95 / max", goal, _is_small(results["regret"]), regret(results)),
        (
            "lines with confidence >= 90 that are true",
            f">= {percent(UNSEEN_TRUE)}",
            true is not None and true >= UNSEEN_TRUE,
            "none" if true is None else with_interval(calibration, "confident_share_true", percent),
        ),
        (
            "expected calibration error",
            f"<= {UNSEEN_ERROR:.2f}",
            error <= UNSEEN_ERROR,
            with_interval(calibration, "expected_calibration_error", "{:.3f}".format),
        ),
        (
            "recommendations that run out of memory as a whole model",
            f"<= {percent(UNSEEN_FAILS)}",
            most <= UNSEEN_FAILS,
            f"{percent(fails)} of {end - first:,}, at most {percent(most)}",
        ),
    ]
    seeds = (
        f"Seeds {first} to {end - 1}, drawn after commit {results['commit']}; {results['environment']['date'][:10]}."
    )
    admitted = (
        f"Against the best that fits as composed, a measure that was chosen after these runs: "
        f"{regret({'regret': results['regret_of_admitted']})}."
    )
    deciles = table(calibration["reliability"], DECILES)
    return f"{goal_table(rows)}\n{admitted}\n\n{deciles}\n{seeds}\n"


def executions(results: Row) -> str:
    """What a choice between eager code and CUDA graphs costs, and what both searches give away."""
    first, end = results["seed_range"]
    rows = []
    for space, found in results["spaces"].items():
        by_device = found["times_by_device"]
        spread = f"by device {by_device['median']:.2f} in the median, {by_device['p90']:.2f} at the 90th percentile"
        means = " and ".join(percent(each["mean"]) for each in found["regret"])
        rows.append(
            (
                f"{space}: device seconds with the choice, whole models included",
                f"<= {MOST_TIMES}x",
                found["times"] <= MOST_TIMES,
                f"{found['times']:.2f}x; {spread}; mean regret without and with it {means}",
            )
        )
    seeds = (
        f"Seeds {first} to {end - 1}, drawn after commit {results['commit']}; {results['environment']['date'][:10]}."
    )
    return f"{goal_table(rows)}\n{seeds}\n"


def _is_small(spread: Row) -> bool:
    return bool(spread["median"] <= 0.0 and spread["p95"] <= UNSEEN_P95 and spread["max"] <= UNSEEN_MAX)


def in_flight(results: Row) -> str:
    """Regret and elapsed time with several trials in flight."""
    found, goals, number = results["all_tables"], results["goals"], results["in_flight"]
    alone, together = found["regret_mean_alone"], found["regret_mean"]
    seconds = f"{found['elapsed_seconds_mean']:.1f} instead of {found['elapsed_seconds_mean_alone']:.1f} s"
    return goal_table(
        [
            (
                f"mean regret with {number} trials in flight",
                "as with one",
                goals["regret_as_with_one"]["met"],
                f"{together:.2%} against {alone:.2%}, {found['num_runs']} runs on {len(results['tables'])} tables",
            ),
            (
                f"time until the last trial with {number} in flight, as a share of that with one",
                "<= 40%",
                goals["elapsed_share"]["met"],
                f"{percent(found['share_of_totals'])}, {seconds} in the mean; devices busy for "
                f"{percent(found['busy_share'])} of the time that one is alone",
            ),
        ]
    )


def second_job(results: Row) -> str:
    """A line for each kind of search: what it reuses, its costs, its regret and its calibration."""
    titles = {
        "alone": "nothing",
        "like": "components of layers (another vocabulary, other layers)",
        "same": "all components",
    }
    columns: Columns = {
        "reused": lambda row: titles[row[0]],
        "device time to confidence 90: median / p95": lambda row: _seconds(row[1]["seconds_to_confident"]),
        "trials": lambda row: f"{row[1]['trials_to_confident']['median']:.0f}",
        "whole search": lambda row: _seconds(row[1]["seconds"]),
        "regret: median / p95 / max": lambda row: regret(row[1]),
        "calibration error": lambda row: f"{row[1]['calibration']['expected_calibration_error']:.3f}",
        "lines >= 90 that are true": lambda row: percent(row[1]["calibration"]["confident_share_true"]),
    }
    number = results["all_tables"]["alone"]["num_runs"]
    return (
        table(results["all_tables"].items(), columns)
        + f"\n{number} runs of each on {len(results['tables'])} tables; the earlier job is off by a common factor of "
        + f"{percent(results['shift_std'])} (standard deviation); replayed on {results['environment']['date'][:10]}.\n"
    )


def _seconds(spread: Row) -> str:
    return f"{spread['median']:.1f} / {spread['p95']:.1f} s"


def cluster(results: Row) -> str:
    """What a second worker brings through Ray, and what Ray costs a trial."""
    speed, cost = results["goals"]["speed_up"], results["goals"]["overhead_seconds"]
    what = f"trials a second through Ray, two workers against one, {results['environment']['num_cpus']} CPU cores"
    return goal_table(
        [
            (what, ">= 1.7x", speed["met"], f"{speed['found']:.2f}x over {results['num_trials']} trials"),
            ("what Ray adds to a trial", "<= 100 ms", cost["met"], f"{1e3 * cost['found']:.1f} ms"),
        ]
    )


def regret(figures: Row) -> str:
    """Median, 95th percentile and largest."""
    return " / ".join(percent(figures["regret"][of]) for of in ("median", "p95", "max"))


def with_interval(calibration: Row, key: str, text: Callable[[float], str]) -> str:
    """A figure and its 95% interval, which a single table does not have."""
    bounds = calibration["intervals_95"].get(key)
    return text(calibration[key]) + (f" ({text(bounds[0])} to {text(bounds[1])})" if bounds else "")


def replayed_on(results: Row) -> str:
    """The devices of the tables, the seeds and the day, as a line of its own."""
    seeds = results["seeds"]
    devices = sorted({str(about["device"]) for about in results["tables"].values()})
    fewer = [f"{TITLES.get(name, name)} {number}" for name, number in seeds.items() if number != max(seeds.values())]
    note = f" ({', '.join(fewer)})" if fewer else ""
    return (
        f"\n{len(results['tables'])} tables recorded on {' and '.join(devices)}; {max(seeds.values())} seeds a "
        f"table{note}; replayed on {results['environment']['date'][:10]}.\n"
    )
