"""Batch tiling on attention, recomputation, and the choice of an attention back end."""

from __future__ import annotations

from typing import Any

from benchmarks.docs.results import Row, facts, grid, measured_on, percent
from bexp.explorer.spec.candidate import Candidate

MEANS = ("plain", "tiled", "explored")
TILING = {
    "tiled": "models whose best tiles where tiling is allowed",
    "explored": "models for which tiles are recommended",
}


def bta(results: Row) -> str:
    """Throughput relative to dense, by limit and by what may be used: by the clock, and in brackets on the device.

    Then how often tiling was worth it.
    """
    rows = [row for row in results["rows"] if row["num_experts"] is not None]
    limits = list(dict.fromkeys(key.partition("/")[0] for row in results["rows"] for key in row["best"]))
    asked = len(results["shape"]["num_experts"]) * len(results["shape"]["top_k"])

    def relative(row: Row, limit: str) -> str:
        clock, device = (
            " / ".join(f"{found[key]:.2f}" if (key := f"{limit}/{means}") in found else "-" for means in MEANS)
            for found in (row["relative_to_dense"], row.get("device_relative_to_dense", {}))
        )
        return f"{clock} ({device})" if "device_relative_to_dense" in row else clock

    def tiled(limit: str, means: str) -> str:
        best = [found for row in rows if (found := row["best"].get(f"{limit}/{means}"))]
        return f"{sum(Candidate.model_validate(b['candidate']).bta_tile is not None for b in best)} of {len(rows)}"

    figures: list[tuple[str, Any]] = [(f"{limit}: {TILING[m]}", tiled(limit, m)) for m in TILING for limit in limits]
    figures += [("models that there was no time for", asked - len(rows) or None)]
    return grid("model", rows, limits, relative, row=_model) + "\n" + facts(figures) + measured_on(results)


def recomputation(results: Row) -> str:
    """Bytes kept and cost of a micro-step by policy, a column a model and expert back end."""
    cells: dict[tuple[str, str], str] = {}
    for row in results["rows"]:
        candidate = Candidate.model_validate(row["candidate"])
        if candidate.bta_tile and candidate.recompute.layer_share:
            continue  # longer and larger than policies of operations; the raw results have them
        experts = f", `{candidate.expert_backend}`" if candidate.expert_backend else ""
        policy = candidate.recompute.value + (f", tile {candidate.bta_tile}" if candidate.bta_tile else "")
        cells[policy, f"{row['name']}{experts}"] = f"{percent(row['bytes_share'], 0)}, {row['step_cost']:+.1%}"
    policies, models = dict.fromkeys(key[0] for key in cells), dict.fromkeys(key[1] for key in cells)
    return grid("policy", policies, models, lambda policy, model: cells.get((policy, model))) + measured_on(results)


def attention_choice(results: Row) -> str:
    """What was picked and how far it is from the fastest, a column a sequence length."""
    ordered = sorted(results["cells"], key=lambda cell: (cell["head_size"], -cell["query_groups"]))
    found = {(f"D={cell['head_size']} {cell['kind']}", cell["seq_length"]): cell for cell in ordered}
    lengths = sorted({cell["seq_length"] for cell in ordered})
    shapes = dict.fromkeys(shape for shape, _ in found)
    summary, within = results["summary"], f"within {100 * (results['within'] - 1):.0f}% of the fastest"
    figures: list[tuple[str, Any]] = [
        (f"picks {within}, by {what}", f"{part['within']} of {summary['cells']}, worst {part['worst_ratio']:.3f}")
        for part, what in ((summary["block"], "the attention block"), (summary["core"], "attention alone"))
        if part["worst_ratio"] is not None
    ]
    figures += [("shapes left out for want of time", len(results["left_out"]) or None)]
    cells = grid("heads", shapes, lengths, lambda *place: _picked(found.get(place)), column="S={}".format)
    return cells + "\n" + facts(figures) + measured_on(results)


def _picked(cell: Row | None) -> str | None:
    """The pick and its time over the fastest's, for the block and for attention alone; once where both are equal."""
    if cell is None:
        return None
    ratios = (cell["verdict"][of]["ratio"] for of in ("block", "core"))
    shown = dict.fromkeys("-" if value is None else f"{value:.3f}" for value in ratios)
    return f"{cell['picked']} {', '.join(shown)}"


def _model(row: Row) -> str:
    return f"E={row['num_experts']} top_k={row['top_k']}"
