"""transformers' own classes and Trainer: composed steps, recommendations, and what `bexp.apply` changes."""

from __future__ import annotations

from typing import Any

from benchmarks.docs.results import GIB, Row, table
from benchmarks.real_trainers import best_of


def compositions(result: Row) -> str:
    """A micro-step composed of its parts against the whole model's."""
    return table(
        result["compositions"],
        {
            "model": lambda row: row["model"],
            "micro-batch": lambda row: row["micro_batch_size"],
            "sequence": lambda row: row["seq_length"],
            "whole": lambda row: f"{1e3 * row['whole_seconds']:.1f} ms",
            "composed time": lambda row: f"{row['composed_seconds'] / row['whole_seconds'] - 1:+.1%}",
            "composed activations": lambda row: (
                f"{row['composed_activation_bytes'] / row['whole_activation_bytes'] - 1:+.1%}"
            ),
        },
    )


def trainers(result: Row) -> str:
    """What the Trainer reached: unchanged at its best, and as recommended by default explorations."""
    return table(
        [row for row in result["models"] if "exploration" in row and not row["fields"]],
        {
            "model": lambda row: row["model"],
            "sequence": lambda row: row["seq_length"],
            "batch": _batch,
            "unchanged, its best": lambda row: _run(best_of(row.get("sweep", []))),
            "as recommended": lambda row: _run(best_of(row.get("recommended", []))),
            "over unchanged": lambda row: _over(row, "recommended", "sweep"),
            "the answer's best with stock kernels": lambda row: _run(best_of(row.get("stock", []))),
            "composed time, peak": _composed,
            "confidence": lambda row: _answer(row).get("confidence"),
            "submit to answer": lambda row: _seconds(row["exploration"]["wall_seconds"]),
        },
    )


def chosen_fields(result: Row) -> str:
    """The same for explorations whose request names more than the defaults."""
    return table(
        [row for row in result["models"] if "exploration" in row and row["fields"]],
        {
            "model": lambda row: row["model"],
            "fields": lambda row: " ".join(f"`{field}`" for field in row["fields"]),
            "batch": _batch,
            "unchanged, its best": lambda row: _run(best_of(row.get("sweep", []))),
            "unchanged with `torch_compile`": lambda row: _run(best_of(row.get("compiled_sweep", []))),
            "as recommended": lambda row: _run(best_of(row.get("recommended", []))),
            "over unchanged": lambda row: _over(row, "recommended", "sweep"),
            "over unchanged with `torch_compile`": lambda row: _over(row, "recommended", "compiled_sweep"),
            "submit to answer": lambda row: _seconds(row["exploration"]["wall_seconds"]),
        },
    )


def set_by_hand(result: Row) -> str:
    """Runs of the Trainer with settings that no exploration chose: its own compilation, or after `bexp.apply`."""
    return table(
        [{"model": row["model"], **run} for row in result["set_by_hand"] for run in row["runs"]],
        {
            "model": lambda run: run["model"],
            "loss": lambda run: run.get("settings", {}).get("loss", "library"),
            "experts": lambda run: run.get("settings", {}).get("expert_backend"),
            "execution": _execution,
            "reached": _run,
        },
    )


def _execution(run: dict[str, Any]) -> str:
    if run.get("torch_compile"):
        return "the Trainer's own `torch_compile`"
    return run.get("settings", {}).get("execution") or "eager"


def _run(run: dict[str, Any] | None) -> str | None:
    if run is None or "tokens_per_second" not in run:
        return None
    checkpointed = " with checkpointing" if run.get("gradient_checkpointing") else ""
    return (
        f"m={run['micro_batch_size']}{checkpointed}: {run['tokens_per_second'] / 1e3:.1f}k tokens/s, "
        f"{run['peak_reserved_bytes'] / GIB:.1f} GiB"
    )


def _batch(row: Row) -> str:
    """The sequences that the Trainer accumulated to; rows of earlier runs did not accumulate."""
    sizes = {run.get("batch_size") for part in ("sweep", "recommended") for run in row.get(part, [])}
    return ", ".join(
        "one micro-batch" if size is None else str(size) for size in sorted(sizes, key=lambda size: size or 0)
    )


def _over(row: Row, ours: str, theirs: str) -> str | None:
    found, stock = best_of(row.get(ours, [])), best_of(row.get(theirs, []))
    if found is None or stock is None:
        return None
    return f"{found['tokens_per_second'] / stock['tokens_per_second']:.3f}x"


def _answer(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = (row["exploration"]["document"] or {}).get("recommendation") or {}
    return found


def _composed(row: Row) -> str | None:
    whole = _answer(row).get("whole_model")
    return None if whole is None else f"{whole['step_error']:+.1%}, {whole['peak_error']:+.1%}"


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.0f} s"
