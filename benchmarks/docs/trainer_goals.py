"""The goals for transformers' own classes and Trainer, beside what was measured."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from benchmarks.docs.goals import Goal
from benchmarks.docs.results import Row, goal_table
from benchmarks.real_trainers import best_of, ratio

NUM_MODELS, NUM_WITHIN, WITHIN = 14, 13, 0.98
MEDIAN_ERROR, MAX_ERROR = 0.02, 0.08
ANSWER_SECONDS = 120.0
APPLIED = {"olmoe": 1.5, "qwen3-30b": 1.4, "llama-3.2": 1.08}
"""Least throughput over the unchanged Trainer, each at its best setting."""
CHECK = re.compile(r"composed\s+step ([+-][\d.]+)%,\s+composed\s+peak ([+-][\d.]+)%")


def goals(result: Row) -> str:
    """A line for each goal."""
    return goal_table([*_recommended(result), *_composed(result), *_answers(result), *_applied(result)])


def _recommended(result: Row) -> Iterator[Goal]:
    """The recommended candidates of default explorations in the Trainer, plain and padded."""
    rows = [row for row in _explored(result) if set(row["fields"]) <= {"padding=right", "padding=left"}]
    runs = [run for row in rows for run in row["recommended"]]
    failed = sum("tokens_per_second" not in run for run in runs)
    yield "recommended candidates that fail in the Trainer", "none", not failed, f"{failed} of {len(runs)} runs"
    for padded, what in ((False, "texts of one length"), (True, "padded texts")):
        found = {row["model"]: ratio(row) for row in rows if row["padded"] is padded}
        within = [name for name, share in found.items() if share is not None and share >= WITHIN]
        if not found:
            continue
        missed = [f"{name} {share or 0:.3f}x" for name, share in found.items() if name not in within]
        text = f"{len(within)} of {len(found)} models" + (f"; not {', '.join(missed)}" if missed else "")
        met = len(found) >= NUM_MODELS and len(within) * NUM_MODELS >= NUM_WITHIN * len(found)
        goal = f">= {NUM_WITHIN} of {NUM_MODELS} models" if not padded else "as many"
        reached = met if not padded else len(within) * NUM_MODELS >= NUM_WITHIN * len(found)
        yield f"within 2% of the Trainer's own best, {what}", goal, reached, text


def _composed(result: Row) -> Iterator[Goal]:
    """Every whole model that an exploration ran, as its log has it."""
    found = [pair for row in _explored(result) for pair in checks(row["exploration"]["log"])]
    for what, errors in zip(("step", "peak"), zip(*found, strict=True), strict=True):
        middle, largest = statistics.median(errors), max(errors)
        goal = f"median <= {MEDIAN_ERROR:.0%}, max <= {MAX_ERROR:.0%}"
        text = f"median {middle:.1%}, max {largest:.1%} over {len(errors)} whole models"
        yield f"composed {what} against the whole model", goal, middle <= MEDIAN_ERROR and largest <= MAX_ERROR, text


def checks(log: list[str]) -> list[tuple[float, float]]:
    """The absolute errors of step and peak that the lines of an exploration's log name."""
    lines = " ".join(line.strip() for line in log if "BEXP203" in line)
    return [(abs(float(step)) / 100, abs(float(peak)) / 100) for step, peak in CHECK.findall(lines)]


def _answers(result: Row) -> Iterator[Goal]:
    """Seconds from submit to the final answer of default explorations, a start of the service included."""
    rows = [row for row in _explored(result) if not row["fields"] and row["exploration"]["wall_seconds"] is not None]
    seconds = {row["model"]: row["exploration"]["wall_seconds"] for row in rows}
    late = [f"{name} {took:.0f} s" for name, took in seconds.items() if took > ANSWER_SECONDS]
    text = f"median {statistics.median(seconds.values()):.0f} s over {len(seconds)} models"
    text += f"; later: {', '.join(late)}" if late else ""
    yield "submit to final answer, the service's start included", f"<= {ANSWER_SECONDS:.0f} s", not late, text


def _applied(result: Row) -> Iterator[Goal]:
    """The best of a model's rows over the unchanged Trainer, and over the Trainer's own compilation where it ran."""
    for name, goal in APPLIED.items():
        rows = [row for row in _explored(result) if row["model"].startswith(name) and not row["padded"]]
        best = max(rows, key=lambda row: ratio(row) or 0.0, default=None)
        share = None if best is None else ratio(best)
        if best is None or share is None:
            continue
        text = f"{share:.2f}x"
        ours, compiled = best_of(best["recommended"]), best_of(best.get("compiled_sweep", []))
        if ours is not None and compiled is not None:
            over = ours["tokens_per_second"] / compiled["tokens_per_second"]
            text += f"; {over:.2f}x of the Trainer's own `torch_compile`"
        yield f"{best['model']} after `bexp.apply` over the unchanged Trainer", f">= {goal}x", share >= goal, text


def _explored(result: Row) -> list[Row]:
    return [row for row in result["models"] if "exploration" in row and "recommended" in row]
