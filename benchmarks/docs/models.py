"""Whole explorations, compositions against whole models, gains over plain choices, and transformers' own classes."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.curves import REFERENCE, SIDES, summarize
from benchmarks.docs.results import Columns, Row, facts, measured_on, percent, ratio, table
from bexp.explorer.spec.candidate import Candidate

SHOWN_CODES = ("BEXP102", "BEXP202", "BEXP203", "BEXP401")
SIDE_TITLES = {REFERENCE: "transformers", "whole": "`bexp`, whole model", "composed": "`bexp`, sum of components"}


def log(results: Row) -> str:
    """The lines that a person sees of one run, as they were."""
    lines = [line for line in results["runs"][0]["lines"] if line.startswith(SHOWN_CODES)]
    return "```\n" + "\n".join(lines) + "\n```\n"


def explorations(results: Row) -> str:
    """A line a model, then what a trial costs beside measuring."""
    runs = results["runs"]
    trials = [trial for run in runs for trial in run["trials"] if trial["kind"] == "components"]
    messaging = statistics.median(trial["measurement"]["phases"]["messaging"] for trial in trials)
    storage = statistics.mean(run["overheads"]["storage_mean_seconds"] for run in runs)
    overheads = [
        ("suggest, median a trial", f"{1e3 * statistics.median(trial['suggest_seconds'] for trial in trials):.0f} ms"),
        ("messages, median a trial", f"{1e3 * messaging:.1f} ms"),
        ("storage, mean a trial", f"{1e3 * storage:.0f} ms"),
        ("process starts a job, at most", max(run["overheads"]["process_starts"] for run in runs)),
        (
            "profiler idle, share of a job, at most",
            percent(max(run["overheads"]["profiler_idle_share"] for run in runs)),
        ),
    ]
    return table(runs, _EXPLORATION) + "\n" + facts(overheads) + measured_on(results)


def explorations_of_devices(results: Row) -> str:
    """The same for models trained on several devices, with what these exchange."""
    columns = {
        "model": lambda run: run["name"],
        "devices": lambda run: run["request"]["num_devices"],
        "sharding": lambda run: best_of(run)["candidate"].get("sharding") or run["request"]["training"]["sharding"],
        "a step": lambda run: f"{best_of(run)['step_seconds']:.1f} s",
        "exchange that nothing hides": lambda run: f"{best_of(run)['communication_seconds']:.1f} s",
        "share": lambda run: percent(best_of(run)["communication_seconds"] / best_of(run)["step_seconds"]),
    }
    return explorations(results) + "\n" + table(results["runs"], columns)


def gains(results: Row) -> str:
    """A line a recorded table: the best over what people would train with instead."""
    alternatives = {
        "over the largest that fits without recomputation": "over_largest_without_recompute",
        "over the largest that fits, recomputing": "over_largest",
        "over the best of stock back ends": "over_stock",
    }
    columns: Columns = {title: partial(_gain_of, key) for title, key in alternatives.items()}
    about: Columns = {
        "table": lambda row: row["name"],
        "best": lambda row: short(Candidate.model_validate(row["best"])),
    }
    counts = [
        (f"tables on which the best gains nothing {title}", f"{found['num_level']} of {found['num_tables']}")
        for title, key in alternatives.items()
        if (found := results["summary"][key])
    ]
    return table(results["rows"], {**about, **columns}) + "\n" + facts(counts)


def fidelity(results: Row) -> str:
    """Errors of composed steps and peaks, by configuration."""
    checks: dict[str, list[Row]] = {}
    for row in results["rows"]:
        if row["check"]:
            checks.setdefault(row["name"], []).append(row["check"])

    def errors(name: str, key: str) -> str:
        found = [abs(check[key]) for check in checks[name]]
        return f"{percent(statistics.median(found))}, {percent(max(found))}"

    columns: Columns = {
        "model": str,
        "candidates": lambda name: len(checks[name]),
        "step: median, largest error": lambda name: errors(name, "step_error"),
        "peak: median, largest error": lambda name: errors(name, "peak_error"),
    }
    return table(checks, columns) + measured_on(results)


def transformers(results: Row) -> str:
    """Relative throughput, a line a model and side, and how far the curves are apart."""
    rows, summary = results["rows"], summarize(results["rows"])
    sizes = sorted({row["micro_batch_size"] for row in rows})
    curves = {
        (model, side): {row["micro_batch_size"]: row for row in rows if (row["name"], row["side"]) == (model, side)}
        for model in summary
        for side in SIDES
    }

    def throughput(key: tuple[str, str], size: int) -> str | None:
        row = curves[key].get(size)
        if row is None or row["outcome"] != "ok":
            return None if row is None else row["outcome"].replace("_", " ")
        base = curves[key][summary[key[0]]["base_micro_batch_size"]]["tokens_per_second"]
        return f"{row['tokens_per_second'] / base:.2f} ({row['tokens_per_second'] / 1e3:.1f})"

    columns: dict[str, Any] = {"model": lambda key: key[0], "layers of": lambda key: SIDE_TITLES[key[1]]}
    columns |= {f"m={size}": lambda key, size=size: throughput(key, size) for size in sizes}
    columns |= {"best m": lambda key: summary[key[0]]["best"].get(key[1])}
    apart = [
        (
            f"{model}, {SIDE_TITLES[side]}: distance from transformers' curve; what transformers loses at its best m",
            f"{percent(against['max_deviation'])}; {percent(against['loss_at_best'])}",
        )
        for model, found in summary.items()
        for side, against in found["against_transformers"].items()
    ]
    loads = [row for row in rows if row["outcome"] == "ok" and row.get("imbalance")]
    apart += [
        (
            "busiest expert over the mean, as both sides were routed",
            ratio(max((r["imbalance"] for r in loads), default=None)),
        ),
        (
            "the same with transformers' random routers",
            ratio(max((r.get("own_imbalance") or 0.0 for r in loads), default=None)),
        ),
    ]
    measured = [key for key in curves if curves[key]]
    return table(measured, columns) + "\n" + facts(apart if loads else apart[:-2]) + measured_on(results)


def best_of(run: Row) -> Row:
    """The recommendation for the model that was asked for."""
    found: Row = run["answer"]["variants"][0]["recommendation"]
    return found


def compared(run: Row, name: str) -> str | None:
    """The gain over an alternative, marked where a part of the alternative is predicted; runs that old lack some."""
    other = (run.get("comparisons") or {}).get(name)
    return _gain(other) + (" (predicted in part)" if other["predicted"] else "") if other else None


def short(candidate: Candidate) -> str:
    """`m=6, cudnn, fused`: what differs from the plainest candidate."""
    parts = [f"m={candidate.micro_batch_size}"]
    parts += [f"tile {candidate.bta_tile}"] if candidate.bta_tile else []
    parts += [f"recompute {candidate.recompute}"] if candidate.recompute != "none" else []
    parts += [candidate.attention_backend]
    parts += [candidate.expert_backend] if candidate.expert_backend else []
    if candidate.context_parallel_layout is not None:
        parts.append(f"{candidate.context_parallel_size} devices a sequence ({candidate.context_parallel_layout})")
    parts += [candidate.sharding] if candidate.sharding is not None else []
    return ", ".join(parts)


def _gain_of(key: str, row: Row) -> str:
    return _gain(row[key])


def _gain(other: Row | None) -> str:
    return ratio(other["gain"]) if other else "-"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} s"


def _check(run: Row) -> str | None:
    check = best_of(run)["whole_model"]
    return check and f"{100 * check['step_error']:+.1f}%, {100 * check['peak_error']:+.1f}%"


_EXPLORATION: Columns = {
    "model": lambda run: run["name"],
    "submit to final": lambda run: _seconds(run["submit_to_final_seconds"]),
    "to confidence 95": lambda run: _seconds(run["submit_to_confidence_target_seconds"]),
    "recommended": lambda run: short(Candidate.model_validate(best_of(run)["candidate"])),
    "x base": lambda run: f"{best_of(run)['performance']:.2f}",
    "confidence": lambda run: best_of(run)["confidence"],
    "over the largest that fits": lambda run: compared(run, "largest_without_recompute"),
    "over the largest, recomputing": lambda run: compared(run, "largest_micro_batch"),
    "over stock best": lambda run: compared(run, "stock"),
    "trials": lambda run: run["overheads"]["num_trials"],
    "composed step, peak": _check,
}
