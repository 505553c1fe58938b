"""What recommendations are held to, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.curves import summarize
from benchmarks.readme.replay import interval, percent
from benchmarks.readme.results import ROOT, exists, load, table
from benchmarks.readme.transformers import apart
from benchmarks.replay.calibration import CONFIDENT
from benchmarks.replay.runs import OURS
from benchmarks.replay.summary import (
    CALIBRATION_ERROR,
    CONFIDENT_SHARE,
    EXHAUSTIVE_SHARE,
    MAX_REGRET,
    MEDIAN_REGRET,
    P95_REGRET,
    SMALL_SPACE,
    SMALL_SPACE_TRIALS,
    cheaper,
)

Row = list[str]

MEDIAN_ERROR, MAX_ERROR, NUM_CHECKED = 0.03, 0.08, 8
CONFIDENT_SECONDS = {"cerebras-gpt-1.3b": 60.0, "llama-3.2-1b": 60.0, "olmoe-1b-7b": 60.0, "qwen3-30b-a3b": 90.0}
"""By the model's name; the last one with 8 layers."""
SHORT_LAYERS = {"qwen3-30b-a3b": 8}
SHOWN_RIVALS = 4
DETERMINISM = "tests/workers/replay/test_search.py"


def goals() -> str:
    """A line a goal that was measured, reached or missed; nothing where no results exist."""
    sources: tuple[tuple[str, Callable[[dict[str, Any]], list[Row]]], ...] = (
        ("h200-replay", of_replay),
        ("h200-explorations", of_explorations),
        ("h200-recorded-fidelity", of_fidelity),
        ("h200-transformers", of_transformers),
    )
    rows = [row for name, render in sources if exists(name) for row in render(load(name))]
    return table(["what", "goal", "measured"], rows) if rows else ""


def of_replay(results: dict[str, Any]) -> list[Row]:
    """Regret, device seconds, calibration and OOMs of the search on recorded tables."""
    found = results["summary"]["goals"]
    if not found:
        return []
    regret, runs = found["regret"]["found"], results["summary"]["strategies"][OURS]["num_runs"]
    limits = {"median": MEDIAN_REGRET, "p95": P95_REGRET, "max": MAX_REGRET}
    parts = (f"{of} {percent(regret[of])}{'' if regret[of] <= limit else ' (missed)'}" for of, limit in limits.items())
    rows = [
        [
            "regret against the exhaustive optimum",
            f"median 0%, p95 <= {P95_REGRET:.0%}, max <= {MAX_REGRET:.0%}",
            f"{_word(found['regret']['met'])}: {', '.join(parts)} over {runs} runs on {len(results['tables'])} tables",
        ]
    ]
    if shares := found["share_of_exhaustive"]["found"]:
        within = sum(share <= EXHAUSTIVE_SHARE for share in shares.values())
        rows.append(
            [
                f"device seconds to the final answer, spaces of >= {SMALL_SPACE} candidates",
                f"<= {EXHAUSTIVE_SHARE:.0%} of exhaustive",
                f"{_word(found['share_of_exhaustive']['met'])}: in {within} of {len(shares)} tables; "
                f"median {percent(statistics.median(shares.values()))}, largest {_largest(shares, percent)}",
            ]
        )
    if trials := found["trials_in_small_spaces"]["found"]:
        within = sum(number <= SMALL_SPACE_TRIALS for number in trials.values())
        rows.append(
            [
                "trials to the final answer, smaller spaces",
                f"<= {SMALL_SPACE_TRIALS}",
                f"{_word(found['trials_in_small_spaces']['met'])}: in {within} of {len(trials)} tables; "
                f"median {statistics.median(trials.values()):.0f}, largest {_largest(trials, '{:.0f}'.format)}",
            ]
        )
    rows.append(_rivals(results["summary"]))
    return [*rows, *_calibrated(results["summary"]), *_memory(found["out_of_memory"]), *_determinism()]


def of_explorations(results: dict[str, Any]) -> list[Row]:
    """Seconds from submit to a confidence of 90, and whether a recommended candidate ran out of memory."""
    times: dict[str, list[float | None]] = {}
    for run in results["runs"]:
        model = run["request"]["model"]
        name, layers = model["name"], SHORT_LAYERS.get(model["name"])
        if name in CONFIDENT_SECONDS and (layers is None or model["num_layers"] == layers):
            sought = run.get("submit_to_confidence_90_seconds", run["submit_to_confidence_target_seconds"])
            times.setdefault(name, []).append(sought)
    rows = []
    if times:
        met = all(s is not None and s <= CONFIDENT_SECONDS[name] for name, found in times.items() for s in found)
        text = (f"{name} {', '.join('never' if s is None else f'{s:.0f} s' for s in s_)}" for name, s_ in times.items())
        rows.append(
            [
                f"submit to confidence >= {CONFIDENT} on one H200, whole-model check apart",
                "; ".join(f"{name} <= {CONFIDENT_SECONDS[name]:.0f} s" for name in times),
                f"{_word(met)}: {'; '.join(text)}{_targets(results)}",
            ]
        )
    checks = [
        t["measurement"]["outcome"] for run in results["runs"] for t in run["trials"] if t["kind"] == "whole_model"
    ]
    if checks:
        failed = sum(outcome == "out_of_memory" for outcome in checks)
        rows.append(
            [
                "recommended configurations that run out of memory as whole models",
                "none",
                f"{_word(not failed)}: {failed} of {len(checks)} whole-model runs",
            ]
        )
    return rows


def of_fidelity(results: dict[str, Any]) -> list[Row]:
    """Step time and peak memory, composed against whole."""
    checks = [row["check"] for row in results["rows"] if row["check"]]
    models = {row["name"] for row in results["rows"] if row["check"]}
    rows = []
    for key, what in (("step_error", "step time"), ("peak_error", "peak memory")):
        errors = [abs(check[key]) for check in checks]
        if not errors:
            continue
        median, largest = statistics.median(errors), max(errors)
        met = median <= MEDIAN_ERROR and largest <= MAX_ERROR and len(errors) >= NUM_CHECKED
        apart = [abs(row["check"][key]) for row in results["rows"] if row["check"] and not row.get("host_bound")]
        device_bound = (
            f"; median {percent(statistics.median(apart))}, max {percent(max(apart))} over the {len(apart)} that the "
            "device limits"
            if apart and len(apart) < len(errors) and not met
            else ""
        )
        rows.append(
            [
                f"{what}, composed against the whole model",
                f"median <= {MEDIAN_ERROR:.0%}, max <= {MAX_ERROR:.0%} over >= {NUM_CHECKED} configurations",
                f"{_word(met)}: median {percent(median)}, max {percent(largest)} over {len(errors)} configurations of "
                f"{len(models)} {'tables' if 'recorded_at' in results else 'models'}{device_bound}",
            ]
        )
    return rows


def of_transformers(results: dict[str, Any]) -> list[Row]:
    """The shape of the curve; it has no limit."""
    found = summarize(results["rows"])
    text = "; ".join(f"{name}: {apart(compared)}" for name, compared in found.items())
    return [["throughput over micro-batch against transformers' own classes", "compared", text]] if text else []


def _calibrated(summary: dict[str, Any]) -> list[Row]:
    found, met = summary["calibration"], summary["goals"]
    if found is None:
        return []
    whole = summary["calibration_of_whole_models"]

    def beside(key: str, text: Callable[[Any], str]) -> str:
        return f"; {text(whole[key])} on tables timed whole" if whole else ""

    error, share, brier = "expected_calibration_error", "confident_share_true", "brier"
    return [
        [
            f"lines with confidence >= {CONFIDENT} whose candidate is within the tolerance",
            f">= {CONFIDENT_SHARE:.0%}",
            f"{_word(met[share]['met'])}: {percent(found[share])}{interval(found, share, percent)} of "
            f"{found['num_confident_lines']:.0f}{beside(share, percent)}",
        ],
        [
            "expected calibration error",
            f"<= {CALIBRATION_ERROR:.2f}",
            f"{_word(met[error]['met'])}: {found[error]:.3f}{interval(found, error)}{beside(error, '{:.3f}'.format)}",
        ],
        [
            "Brier score",
            "below the constant forecaster's",
            f"{_word(met['brier_below_constant']['met'])}: {found[brier]:.3f} against {found['brier_constant']:.3f}"
            f"{beside(brier, '{:.3f}'.format)}",
        ],
    ]


def _rivals(summary: dict[str, Any]) -> Row:
    """Over all tables, which is what a strategy is chosen by; and where on one table a cheaper one was as lucky."""
    everywhere = sorted(cheaper({"all": summary["strategies"]}))
    names = [text.removeprefix("all: ") for text in everywhere]
    lucky = summary["goals"]["cheaper_with_equal_or_better_regret"]["found"]
    more = f" and {len(lucky) - SHOWN_RIVALS} more" if len(lucky) > SHOWN_RIVALS else ""
    single = f"; on single tables: {'; '.join(lucky[:SHOWN_RIVALS])}{more}" if lucky else ""
    return [
        "strategies that take less device time with equal or better regret",
        "none",
        f"{_word(not names)}: {', '.join(names) or 'none'} over all tables{single}",
    ]


def _memory(found: dict[str, Any]) -> list[Row]:
    return [["OOMs met during a search", "<= 1 in the median", f"{_word(found['met'])}: {found['found']:.0f}"]]


def _determinism() -> list[Row]:
    assert (ROOT / DETERMINISM).exists(), "the test that the README names"
    what = "same seed, same table: the same trials, also across a kill and resume"
    return [["determinism", what, f"by test (`{DETERMINISM}`)"]]


def _targets(results: dict[str, Any]) -> str:
    """Says so where a higher confidence than asked for was waited for."""
    higher = {
        run["request"]["budget"]["confidence_target"]
        for run in results["runs"]
        if "submit_to_confidence_90_seconds" not in run
    } - {CONFIDENT}
    return f" (to confidence {', '.join(map(str, sorted(higher)))})" if higher else ""


def _largest(found: dict[str, float], text: Callable[[float], str]) -> str:
    name = max(found, key=found.__getitem__)
    return f"{text(found[name])} ({name})"


def _word(met: bool) -> str:
    return "reached" if met else "missed"
