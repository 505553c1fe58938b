"""Throughput over micro-batch beside that of transformers' own classes."""

from __future__ import annotations

from typing import Any

from benchmarks.curves import REFERENCE, SIDES, summarize
from benchmarks.readme.results import measured_on, table

_TITLES = {REFERENCE: "transformers", "whole": "`bexp`, whole model", "composed": "`bexp`, sum of components"}


def transformers(results: dict[str, Any], name: str) -> str:
    """Relative throughput, a line a model and side, and how far the curves are apart."""
    rows, summary = results["rows"], summarize(results["rows"])
    if not summary:
        return ""
    sizes = sorted({row["micro_batch_size"] for row in rows})
    lines = []
    for model, found in summary.items():
        for side in SIDES:
            mine = {r["micro_batch_size"]: r for r in rows if (r["name"], r["side"]) == (model, side)}
            if mine:
                cells = [_cell(mine.get(size), mine[found["base_micro_batch_size"]]) for size in sizes]
                lines.append([model, _TITLES[side], *cells, str(found["best"][side])])
    return "".join(
        [
            "Training steps (two accumulated micro-steps, loss over full logits, fused AdamW) with Hugging Face "
            f"transformers {results['transformers']}'s own classes and with the layers that the profiler times: "
            "tokens/s relative to the smallest micro-batch, in brackets thousands of tokens/s "
            f"(`python -m benchmarks.transformers_curve --out benchmarks/results/{name}.json`):\n\n",
            table(["model", "layers", *(f"m={size}" for size in sizes), "best"], lines),
            "\n",
            *(f"{model}: {apart(found)}{_loads(rows, model)}. " for model, found in summary.items()),
            f"{measured_on(results)}\n",
        ]
    )


def apart(found: dict[str, Any]) -> str:
    """How far the product's curves are from transformers', in words."""
    parts = [
        f"{'the whole model' if side == 'whole' else 'the sum of components'} keeps within "
        f"{100 * against['max_deviation']:.1f}% of transformers' curve, whose model loses "
        f"{100 * against['loss_at_best']:.1f}% at micro-batch {found['best'][side]}, the best here"
        for side, against in found["against_transformers"].items()
    ]
    return "; ".join(parts) if parts else "not compared"


def _loads(rows: list[dict[str, Any]], model: str) -> str:
    """Both sides' experts, how evenly they are loaded, and how transformers' own routers would load them."""
    mine = [row for row in rows if row["name"] == model and row["outcome"] == "ok" and row.get("imbalance")]
    theirs = [row for row in mine if row["side"] == REFERENCE]
    ours = [row for row in mine if row["side"] != REFERENCE]
    if not theirs or not ours:
        return ""
    return (
        f" (experts `{theirs[0]['experts']}` and `{ours[0]['experts']}`; both route alike, the busiest expert has up "
        f"to {max(row['imbalance'] for row in mine):.2f}x the mean load; transformers' random routers would give it "
        f"{max(row['own_imbalance'] for row in theirs):.1f}x)"
    )


def _cell(row: dict[str, Any] | None, base: dict[str, Any]) -> str:
    if row is None:
        return "-"
    if row["outcome"] != "ok":
        return str(row["outcome"]).replace("_", " ")
    relative = row["tokens_per_second"] / base["tokens_per_second"]
    return f"{relative:.2f} ({row['tokens_per_second'] / 1e3:.1f})"
