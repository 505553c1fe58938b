"""Whole MoE layers and expert FFNs against dense ones of the same active FLOPs."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.moe_contenders import DENSE
from benchmarks.readme.results import measured_on, table

_COMPILED = " compile"
_FEWEST_COMPARED = 2
_WHAT = {
    "layer": "Whole MoE layers (norm, router, experts, combination)",
    "experts": "Expert FFNs alone",
}


def moe_layer(results: dict[str, Any], name: str) -> str:
    """At the largest micro-batch by back end; and the fastest back end by micro-batch."""
    shape = results["shape"]
    say = [
        f"MoE layers of {shape['hidden_size']} x {shape['expert_ffn_hidden_size']}, S={shape['seq_length']}, bfloat16, "
        "forward and backward, gradients of the matrices written, not accumulated: throughput by the device's time "
        "relative to the faster of an eager and a compiled dense FFN of the same active FLOPs "
        f"(`python -m benchmarks.moe_layer{' --quick' if name.endswith('-quick') else ''} "
        f"--out benchmarks/results/{name}.json`). ",
    ]
    relative = _relative(results["rows"])
    for kind, what in _WHAT.items():
        rows = [row for row in relative if row["kind"] == kind]
        if not rows:
            continue
        sizes = sorted({row["micro_batch_size"] for row in rows})
        say += [f"{what} at micro-batch {sizes[-1]}, with their saved activations:\n\n", _largest(rows), "\n"]
        if len(sizes) > 1:
            compiled = sorted({row["micro_batch_size"] for row in rows if row["backend"] == "dense compile"})
            where = ", ".join(f"m={size}" for size in compiled) or "none"
            say += [
                f"The fastest back end by micro-batch (dense compiled at {where}), where more than one had time; in "
                "brackets what the host takes longer than the device:\n\n",
                _by_size(rows, sizes),
                "\n",
            ]
    errors = [row["error"] for row in results["errors"]]
    worst = math.nan if any(math.isnan(error) for error in errors) else max(errors, default=0.0)
    say.append(
        f"Largest relative error against float64 at {shape['seq_length']} tokens: {worst:.1e}. {measured_on(results)}\n"
    )
    return "".join(say)


def _relative(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their throughput relative to the fastest dense one at the same tokens, by the device's time."""
    best: dict[tuple[str, int, int], float] = {}
    for row in rows:
        if row["backend"] in DENSE and "device_seconds" in row:
            key = (row["kind"], row["top_k"], row["micro_batch_size"])
            best[key] = min(best.get(key, math.inf), row["device_seconds"])
    found = []
    for row in rows:
        dense = best.get((row["kind"], row["top_k"], row["micro_batch_size"]))
        given = {key: value for key, value in row.items() if key != "relative_to_dense"}
        if dense is not None and "device_seconds" in row:
            given["relative_to_dense"] = dense / row["device_seconds"]
        found.append(given)
    return found


def _largest(rows: list[dict[str, Any]]) -> str:
    largest = max(row["micro_batch_size"] for row in rows)
    rows = [row for row in rows if row["micro_batch_size"] == largest]
    models = list(dict.fromkeys((row["num_experts"], row["top_k"]) for row in rows))
    names = list(dict.fromkeys(row["backend"] for row in rows if row["backend"] in DENSE or not _is_compiled(row)))
    found = {(row["num_experts"], row["top_k"], row["backend"]): row for row in rows}
    compiled = {(row["num_experts"], row["top_k"]): row for row in rows if _is_compiled(row)}
    head = [name if name in DENSE else f"`{name}`" for name in names]
    lines = []
    for model in models:
        cells = [_cell(found.get((*model, name))) for name in names]
        if compiled:
            best = compiled.get(model)
            cells.append(f"`{best['backend'].removesuffix(_COMPILED)}` {_cell(best)}" if best else "-")
        lines.append([f"E={model[0]} top_k={model[1]}", *cells])
    return table(["model", *head, *(["fastest, compiled"] if compiled else [])], lines)


def _by_size(rows: list[dict[str, Any]], sizes: list[int]) -> str:
    lines = []
    for model in dict.fromkeys((row["num_experts"], row["top_k"]) for row in rows):
        cells = []
        for size in sizes:
            mine = [
                row
                for row in rows
                if (row["num_experts"], row["top_k"], row["micro_batch_size"]) == (*model, size)
                and row["backend"] not in DENSE
                and "relative_to_dense" in row
            ]
            if len(mine) < _FEWEST_COMPARED:
                cells.append("-")
                continue
            best = max(mine, key=lambda row: float(row["relative_to_dense"]))
            host = best["host_seconds"] / best["device_seconds"]
            cells.append(
                f"{best['relative_to_dense']:.2f}x {best['backend']}" + (f" ({host:.1f}x)" if host > 1 else "")
            )
        lines.append([f"E={model[0]} top_k={model[1]}", *cells])
    return table(["model", *(f"m={size}" for size in sizes)], lines)


def _is_compiled(row: dict[str, Any]) -> bool:
    return row["backend"] not in DENSE and str(row["backend"]).endswith(_COMPILED)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if "relative_to_dense" not in row:
        return str(row.get("reason", "-"))
    return f"{row['relative_to_dense']:.2f}x, {row['saved_bytes'] / 2**30:.2f} GiB"
