"""Batch tiling on attention, recomputation, and the choice of an attention back end."""

from __future__ import annotations

from benchmarks.docs.results import Row, facts, measured_on, percent, table
from explorer.spec.candidate import Candidate

MEANS = ("plain", "tiled", "explored")


def bta(results: Row) -> str:
    """Throughput relative to dense, by limit and by what may be used; then how often tiling was worth it."""
    rows = [row for row in results["rows"] if row["num_experts"] is not None]
    limits = list(dict.fromkeys(key.partition("/")[0] for row in results["rows"] for key in row["best"]))
    shape = results["shape"]

    def relative(row: Row, limit: str) -> str:
        found = (row["relative_to_dense"].get(f"{limit}/{means}") for means in MEANS)
        return " / ".join("-" if value is None else f"{value:.2f}" for value in found)

    columns = {_spaced(limit): lambda row, limit=limit: relative(row, limit) for limit in limits}
    about = {"model": lambda row: f"E={row['num_experts']} top_k={row['top_k']}"}
    asked = len(shape["num_experts"]) * len(shape["top_k"])
    tiling = [
        (
            f"{_spaced(limit)}: models whose best tiles where tiling is allowed",
            f"{_num_tiled(rows, limit, 'tiled')} of {len(rows)}",
        )
        for limit in limits
    ]
    tiling += [
        (
            f"{_spaced(limit)}: models for which the explorer recommends tiles",
            f"{_num_tiled(rows, limit, 'explored')} of {len(rows)}",
        )
        for limit in limits
    ]
    left_out = ("models that there was no time for", asked - len(rows) or None)
    return table(rows, about | columns) + "\n" + facts([*tiling, left_out]) + measured_on(results)


def _num_tiled(rows: list[Row], limit: str, means: str) -> int:
    found = [row["best"].get(f"{limit}/{means}") for row in rows]
    return sum(Candidate.model_validate(best["candidate"]).bta_tile is not None for best in found if best)


def _spaced(limit: str) -> str:
    return limit.replace("GiB", " GiB")


def recomputation(results: Row) -> str:
    """Bytes kept and cost of a micro-step by policy, a column a model and expert back end."""
    columns: dict[str, dict[str, str]] = {}
    for row in results["rows"]:
        candidate = Candidate.model_validate(row["candidate"])
        if candidate.bta_tile and candidate.recompute.layer_share:
            continue  # longer and larger than policies of operations; the raw results have them
        experts = f", `{candidate.expert_backend}`" if candidate.expert_backend else ""
        policy = candidate.recompute.value + (f", tile {candidate.bta_tile}" if candidate.bta_tile else "")
        found = f"{percent(row['bytes_share'], 0)}, {row['step_cost']:+.1%}"
        columns.setdefault(f"{row['name']}{experts}", {})[policy] = found
    policies = dict.fromkeys(policy for cells in columns.values() for policy in cells)
    shown = {title: lambda policy, cells=cells: cells.get(policy) for title, cells in columns.items()}
    return table(policies, {"policy": str} | shown) + measured_on(results)


def attention_choice(results: Row) -> str:
    """What was picked and how far it is from the fastest, a column a sequence length."""
    found = {(cell["head_size"], cell["kind"], cell["seq_length"]): cell for cell in results["cells"]}
    shapes = dict.fromkeys(
        (cell["head_size"], cell["kind"])
        for cell in sorted(results["cells"], key=lambda cell: (cell["head_size"], -cell["query_groups"]))
    )
    lengths = sorted({cell["seq_length"] for cell in results["cells"]})
    columns = {f"S={s}": lambda shape, s=s: _picked(found.get((*shape, s))) for s in lengths}
    summary, within = results["summary"], f"within {100 * (results['within'] - 1):.0f}% of the fastest"
    counts = [
        (
            f"picks {within}, by {what}",
            f"{summary[of]['within']} of {summary['cells']}, worst {summary[of]['worst_ratio']:.3f}",
        )
        for of, what in (("block", "the attention block"), ("core", "attention alone"))
        if summary[of]["worst_ratio"] is not None
    ]
    left_out = ("shapes left out for want of time", len(results["left_out"]) or None)
    about = {"heads": lambda shape: f"D={shape[0]} {shape[1]}"}
    return table(shapes, about | columns) + "\n" + facts([*counts, left_out]) + measured_on(results)


def _picked(cell: Row | None) -> str | None:
    """The pick and its time over the fastest's, for the block and for attention alone; once where both are equal."""
    if cell is None:
        return None
    ratios = (cell["verdict"][of]["ratio"] for of in ("block", "core"))
    shown = dict.fromkeys("-" if value is None else f"{value:.3f}" for value in ratios)
    return f"{cell['picked']} {', '.join(shown)}"
