"""The goals for recommendations, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks.docs import waiting
from benchmarks.docs.results import ROOT, Row, facts, find, goal_table, percent
from benchmarks.docs.search import with_interval
from benchmarks.replay import summary as limits
from benchmarks.replay.calibration import CONFIDENT
from benchmarks.replay.runs import OURS

Goal = tuple[str, str, bool, str]

MEDIAN_ERROR, MAX_ERROR, NUM_CHECKED = 0.03, 0.08, 8
CONFIDENT_SECONDS = {
    "cerebras-gpt-1.3b": 60.0,
    "llama-3.2-1b": 60.0,
    "olmoe-1b-7b": 60.0,
    "qwen3-30b-a3b-8-layers": 90.0,
}
DETERMINISM = "tests/workers/replay/test_search.py"


def goals() -> str:
    """Return a line for each goal that was measured; goals without results are left out."""
    sources: tuple[tuple[str, Callable[[Row], Iterator[Goal]]], ...] = (
        ("h200-replay", of_replay),
        ("h200-explorations", of_explorations),
        ("h100-explorations", waiting.of_waiting),
        ("h200-recorded-fidelity", of_fidelity),
    )
    rows = [row for name, render in sources if (found := find(name)) is not None for row in render(found)]
    return goal_table(rows) if rows else ""


def in_short() -> str:
    """Return the few figures for a reader who has one minute."""
    replay, gains, runs = find("h200-replay"), find("h200-gains"), find("h100-explorations")
    drawn, unseen = find("replay-drawn"), find("replay-unseen")
    if replay is None or gains is None or runs is None or drawn is None or unseen is None:
        return ""
    ours, noisy = (found["summary"]["strategies"][OURS] for found in (replay, drawn))
    true = [found["confident_share_true"] for found in (drawn["summary"]["calibration"], unseen["calibration"])]
    first, end = unseen["seed_range"]
    plain, stock = gains["summary"]["over_largest_without_recompute"], gains["summary"]["over_stock"]
    regret, repeated, elsewhere = (
        ", ".join(f"{of} {percent(spread[of])}" for of in ("median", "p95", "max"))
        for spread in (noisy["regret"], ours["regret"], unseen["regret"])
    )
    return facts(
        [
            ("throughput lost against the exhaustive optimum, 14 recorded tables, runs that scatter", regret),
            ("the same where every run repeats the recorded one", repeated),
            (f"the same on {end - first:,} simulated devices that nothing was tuned to", elsewhere),
            (
                "device time of a search without whole models, as a share of measuring everything, median",
                percent(ours["share_of_exhaustive"]["median"]),
            ),
            (
                f"lines of confidence {CONFIDENT} and more that are true",
                f"{percent(true[0])} on the tables, {percent(true[1])} on the simulated devices",
            ),
            *waiting.in_short(runs),
            (
                "best over the largest micro-batch that fits without recomputation",
                f"nothing on {plain['num_level']} of {plain['num_tables']} tables, {plain['max']:.2f}x at most",
            ),
            (
                "best over the best that needs no kernel of ours",
                f"nothing on {stock['num_level']} of {stock['num_tables']} tables, {stock['max']:.2f}x at most",
            ),
        ]
    )


def of_replay(results: Row) -> Iterator[Goal]:
    """Regret, device seconds, rivals, calibration and OOMs of the search on recorded tables."""
    summary = results["summary"]
    found = summary["goals"]
    if not found:
        return
    regret = found["regret"]["found"]
    goal = f"median 0%, p95 <= {limits.P95_REGRET:.0%}, max <= {limits.MAX_REGRET:.0%}"
    parts = ", ".join(f"{of} {percent(regret[of])}" for of in ("median", "p95", "max"))
    yield "regret against the exhaustive optimum", goal, found["regret"]["met"], parts
    if shares := found["share_of_exhaustive"]["found"]:
        what = f"device seconds to the final answer, spaces of >= {limits.SMALL_SPACE} candidates"
        within = sum(share <= limits.EXHAUSTIVE_SHARE for share in shares.values())
        text = f"in {within} of {len(shares)} tables; {_middle(shares, percent)}"
        goal = f"<= {limits.EXHAUSTIVE_SHARE:.0%} of exhaustive"
        yield what, goal, found["share_of_exhaustive"]["met"], text
    if trials := found["trials_in_small_spaces"]["found"]:
        within = sum(number <= limits.SMALL_SPACE_TRIALS for number in trials.values())
        text = f"in {within} of {len(trials)} tables; {_middle(trials, '{:.0f}'.format)}"
        goal = f"<= {limits.SMALL_SPACE_TRIALS}"
        yield "trials to the final answer, smaller spaces", goal, found["trials_in_small_spaces"]["met"], text
    yield from _rivals(summary)
    yield from _calibrated(summary)
    memory = found["out_of_memory"]
    yield "OOMs met during a search", "<= 1 in the median", memory["met"], f"{memory['found']:.0f}"
    assert (ROOT / DETERMINISM).exists(), "the test that the page names"
    what = "same seed, same table: the same trials, also across a kill and resume"
    yield "determinism", what, True, f"by test (`{DETERMINISM}`)"


def of_explorations(results: Row) -> Iterator[Goal]:
    """Seconds from submit to a confidence of 90, and whether a recommended candidate ran out of memory."""
    times = {
        run["name"]: run["submit_to_confidence_90_seconds"]
        for run in results["runs"]
        if run["name"] in CONFIDENT_SECONDS and "submit_to_confidence_90_seconds" in run
    }
    if times:
        met = all(s is not None and s <= CONFIDENT_SECONDS[name] for name, s in times.items())
        text = "; ".join(f"{name} {'never' if s is None else f'{s:.0f} s'}" for name, s in times.items())
        goal = "; ".join(f"{name} <= {CONFIDENT_SECONDS[name]:.0f} s" for name in times)
        yield f"submit to confidence >= {CONFIDENT} on one H200, whole-model check apart", goal, met, text
    trials = [trial for run in results["runs"] for trial in run["trials"] if trial["kind"] == "whole_model"]
    if trials:
        failed = sum(trial["measurement"]["outcome"] == "out_of_memory" for trial in trials)
        what = "recommended candidates that run out of memory as whole models"
        yield what, "none", not failed, f"{failed} of {len(trials)} whole-model runs"


def of_fidelity(results: Row) -> Iterator[Goal]:
    """Step time and peak memory, composed against whole."""
    rows = [row for row in results["rows"] if row["check"]]
    over = f"{len(rows)} candidates of {len({row['name'] for row in rows})} tables"
    for key, what in (("step_error", "step time"), ("peak_error", "peak memory")):
        errors = [abs(row["check"][key]) for row in rows]
        if not errors:
            continue
        met = statistics.median(errors) <= MEDIAN_ERROR and max(errors) <= MAX_ERROR and len(errors) >= NUM_CHECKED
        device = [abs(row["check"][key]) for row in rows if not row.get("host_bound")]
        text = f"{_errors(errors)} over {over}"
        if device and len(device) < len(errors):
            text += f"; {_errors(device)} over the {len(device)} that the device limits"
        goal = f"median <= {MEDIAN_ERROR:.0%}, max <= {MAX_ERROR:.0%}"
        yield f"{what}, composed against the whole model", goal, met, text


def _rivals(summary: Row) -> Iterator[Goal]:
    """Judged on every table, and over all of them."""
    what = "strategies that take less device time with equal or better regret"
    tables = limits.by_table_rivals(summary["tables"])
    some = [name for name, rivals in tables.items() if rivals]
    text = f"{sum(map(len, tables.values()))} cases on {len(some)} of {len(tables)} tables"
    yield f"{what}, on each table", "none", not some, text
    everywhere = limits.by_table_rivals({"all": summary["strategies"]})["all"]
    yield f"{what}, over all tables together", "none", not everywhere, ", ".join(everywhere) or "none"


def _calibrated(summary: Row) -> Iterator[Goal]:
    found, met, whole = summary["calibration"], summary["goals"], summary["calibration_of_whole_models"]
    if found is None:
        return

    def beside(key: str, text: Callable[[float], str]) -> str:
        return f"; {text(whole[key])} on tables timed whole" if whole else ""

    share, error, brier = "confident_share_true", "expected_calibration_error", "brier"
    text = with_interval(found, share, percent) + beside(share, percent)
    what = f"lines with confidence >= {CONFIDENT} whose candidate is within the tolerance"
    yield what, f">= {limits.CONFIDENT_SHARE:.0%}", met[share]["met"], text
    text = with_interval(found, error, "{:.3f}".format) + beside(error, "{:.3f}".format)
    yield "expected calibration error", f"<= {limits.CALIBRATION_ERROR:.2f}", met[error]["met"], text
    text = f"{found[brier]:.3f} against {found['brier_constant']:.3f}{beside(brier, '{:.3f}'.format)}"
    yield "Brier score", "below the constant forecaster's", met["brier_below_constant"]["met"], text


def _errors(errors: list[float]) -> str:
    return f"median {percent(statistics.median(errors))}, max {percent(max(errors))}"


def _middle(found: dict[str, float], text: Callable[[float], str]) -> str:
    name = max(found, key=found.__getitem__)
    return f"median {text(statistics.median(found.values()))}, largest {text(found[name])} ({name})"
