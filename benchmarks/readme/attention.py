"""Batch tiling on attention, and the choice of an attention back end."""

from __future__ import annotations

from typing import Any

from benchmarks.readme.results import left_out, measured_on, table
from explorer.spec.candidate import Candidate

_MEANS = ("plain", "tiled", "explored")


def bta(results: dict[str, Any], name: str) -> str:
    """Throughput relative to dense, by limit and by what may be used; and what the explorer recommends."""
    shape, rows = results["shape"], results["rows"]
    sparse = [row for row in rows if row["num_experts"] is not None]
    limits = list(dict.fromkeys(key.partition("/")[0] for row in rows for key in row["best"]))
    options = f" --attention {shape['attention']}" if shape.get("attention") else ""
    if shape["experts"] != ["grouped_mm"]:
        options += f" --experts {' '.join(shape['experts'])}"
    asked = len(shape["num_experts"]) * len(shape["top_k"])
    backend = next(
        (found["candidate"]["attention_backend"] for row in rows for found in row["best"].values() if found), ""
    )
    lines = [
        [
            f"E={row['num_experts']} top_k={row['top_k']}",
            *(" / ".join(_relative(row, limit, means) for means in _MEANS) for limit in limits),
        ]
        for row in sparse
    ]
    say = [
        f"Batch tiling on attention with `{backend}` attention: tokens/s of an MoE model "
        f"({shape['num_layers']} layers, {shape['hidden_size']} x {shape['expert_ffn_hidden_size']}, "
        f"S={shape['seq_length']}, state sharded over "
        f"{shape['num_devices']}) relative to the dense one of the same active FLOPs at its own best, under three "
        "memory limits: without tiling and recomputation / with tiling allowed / as the explorer recommends "
        f"(`python -m benchmarks.bta{options} --out benchmarks/results/{name}.json`):\n\n",
        table(["model", *(_spaced(limit) for limit in limits)], lines),
        "\n",
    ]
    say += [f"{_spaced(limit)}: {_spread(sparse, limit)}; {_gain(sparse, limit)}. " for limit in limits]
    short = "; there was no time for the others" if len(sparse) < asked else ""
    say.append(f"{len(sparse)} of the {asked} models that were asked for are in the table{short}. ")
    say.append(f"{measured_on(results)}\n")
    return "".join(say)


def attention_choice(results: dict[str, Any], name: str) -> str:
    """What was picked and how far it is from the fastest, a column a sequence length."""
    cells, summary = results["cells"], results["summary"]
    lengths = sorted({cell["seq_length"] for cell in cells})
    shapes = sorted({(cell["head_size"], -cell["query_groups"], cell["kind"]) for cell in cells}, reverse=True)
    found = {(cell["seq_length"], cell["head_size"], -cell["query_groups"]): cell for cell in cells}
    lines = [
        [f"D={size} {kind}", *(_picked(found.get((length, size, groups))) for length in lengths)]
        for size, groups, kind in sorted(shapes, key=lambda shape: shape[:2])
    ]
    within = f"{100 * (results['within'] - 1):.0f}%"
    parts = []
    for of, what in (("block", "the attention block"), ("core", "attention alone")):
        worst = summary[of]["worst_ratio"]
        text = f"{summary[of]['within']} of {summary['cells']} picks are within {within} of the fastest by {what}"
        parts.append(text + ("" if worst is None else f" (worst {worst:.3f})"))
    return "".join(
        [
            f"The attention back end that the explorer picks ({results['num_heads']} heads, {results['tokens']} "
            "tokens, causal, bfloat16, forward and backward), and its time over the fastest's when all are timed again "
            "independently, for the whole block and for attention alone (once where both are equal) "
            f"(`python -m benchmarks.attention_choice --out benchmarks/results/{name}.json`):\n\n",
            table(["", *(f"S={length}" for length in lengths)], lines),
            f"\n{'; '.join(parts)}.{left_out(len(results['left_out']), 'shapes')} {measured_on(results)}\n",
        ]
    )


def _picked(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    ratios = (cell["verdict"][of]["ratio"] for of in ("block", "core"))
    shown = dict.fromkeys("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
    return f"{cell['picked']} {', '.join(shown)}"


def _relative(row: dict[str, Any], limit: str, means: str) -> str:
    found = row["relative_to_dense"].get(f"{limit}/{means}")
    if found is None:
        return "-"
    return f"{found:.2f}"


def _spread(rows: list[dict[str, Any]], limit: str) -> str:
    """The worst and best of every column that has any."""
    parts = []
    for means in _MEANS:
        found = [
            row["relative_to_dense"][key] for row in rows if (key := f"{limit}/{means}") in row["relative_to_dense"]
        ]
        parts.append(f"{means} {min(found):.2f} to {max(found):.2f}" if found else f"{means}: nothing fits")
    return ", ".join(parts)


def _gain(rows: list[dict[str, Any]], limit: str) -> str:
    """How often the best candidate tiles where tiling is allowed, and where everything is and the explorer chooses.

    The best that may tile is at least as fast as the best that may not, since it may also leave it.
    """
    counts = []
    for means in ("tiled", "explored"):
        found = [row["best"].get(f"{limit}/{means}") for row in rows]
        counts.append(sum(Candidate.model_validate(f["candidate"]).bta_tile is not None for f in found if f))
    return f"where tiling is allowed the best tiles in {counts[0]} of {len(rows)}, the recommended in {counts[1]}"


def _spaced(limit: str) -> str:
    return limit.replace("GiB", " GiB")
