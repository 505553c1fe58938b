"""Plans beside what others published of the same meshes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.docs.results import Row, goal_table, measured_on, table

MEDIAN_ERROR, MAX_ERROR, NUM_ROWS = 0.12, 0.25, 12


def published_plans(result: Row) -> str:
    """The rows with their errors and parts, the goals, the sources, and what was left out."""
    rows = [{"name": name, **row} for name, row in result["rows"].items()]
    done = [row for row in rows if "predicted" in row]
    failed = "".join(f"- `{row['name']}` was not predicted: {row['reason']}.\n" for row in rows if "reason" in row)
    figures = table(
        done,
        {
            "row": lambda row: f"`{row['name']}`",
            "devices": lambda row: f"{row['request']['num_devices']:,}",
            "mesh": mesh_of,
            "micro-batch": lambda row: row["request"]["micro_batch_size"],
            "published": lambda row: f"{row['published']:,.0f}",
            "predicted": lambda row: f"{row['predicted']:,.0f}",
            "error": lambda row: f"{row['error']:+.1%}",
            "computation": lambda row: f"{row['compute_share']:.0%}",
            "exchange": lambda row: f"{row['exchange_share']:.0%}",
            "bubble": lambda row: f"{row['bubble_share']:.0%}",
        },
    )
    notes = "".join(f"- {note}: {names}.\n" for note, names in notes_of(done))
    used = {row["source"] for row in done}
    sources = table(
        [(name, source) for name, source in result["sources"].items() if name in used],
        {
            "source": lambda pair: f"`{pair[1]['document']}`",
            "commit": lambda pair: pair[1]["commit"][:12],
            "date": lambda pair: pair[1]["date"],
            "machine": lambda pair: pair[1]["machine"],
            "rows": lambda pair: sum(row["source"] == pair[0] for row in done),
        },
    )
    left_out = "".join(f"- {each['rows']}: {each['reason']}.\n" for each in result["left_out"])
    return (
        "## Plans beside published figures\n\n"
        "Tokens a second of each device, in BF16 on H100s. The blocks of one device were measured on one GPU, the "
        f"fabric was described as `{result['fabric']}`, and nothing was fitted to these rows "
        "(`python -m benchmarks.published_plans`).\n\n"
        f"{figures}\n{failed}{goal_table(goals_of(result['summary']))}\n"
        f"What the rows have and the predictions have not:\n\n{notes}\n{sources}\nLeft out:\n\n{left_out}"
        f"{measured_on(result)}\n"
    )


def mesh_of(row: dict[str, Any]) -> str:
    """Return the sizes of a row's mesh that are not 1, its sharding and its recomputation."""
    asked = row["request"]["parallelism"]
    names = {"tensor": "TP", "pipeline": "PP", "virtual_stages": "VP", "expert": "EP"}
    sizes = [f"{short} {asked[name]}" for name, short in names.items() if asked.get(name, 1) > 1]
    return ", ".join([*sizes, asked["sharding"], f"recompute {row['request']['recompute'][0]}"])


def notes_of(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each note with the names of its rows."""
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        yield note, ", ".join(f"`{row['name']}`" for row in rows if note in row["notes"])


def goals_of(summary: dict[str, Any]) -> Iterator[tuple[str, str, bool, str]]:
    """Yield the goals of the comparison."""
    yield "published rows predicted", f">= {NUM_ROWS}", summary["rows"] >= NUM_ROWS, str(summary["rows"])
    if summary["rows"]:
        median, most = summary["median_error"], summary["max_error"]
        met = median <= MEDIAN_ERROR and most <= MAX_ERROR
        goal = f"median <= {MEDIAN_ERROR:.0%}, max <= {MAX_ERROR:.0%}"
        yield "error of tokens/s of each device", goal, met, f"median {median:.1%}, max {most:.1%}"
    if summary["pairs"]:
        same = summary["pairs_in_order"]
        text = f"{same} of {summary['pairs']} pairs"
        yield "meshes of one model and table in the published order", "all", same == summary["pairs"], text
