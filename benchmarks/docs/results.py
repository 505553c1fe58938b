"""Raw results, the table renderer, and the format of figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bexp.explorer.spec.hardware import HardwareSpec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 1 << 30

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Any], Any]]


def load(name: str) -> Row:
    """A recorded run."""
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def find(name: str) -> Row | None:
    """A recorded run; null if there is none of this name."""
    return load(name) if (RESULTS / f"{name}.json").exists() else None


def table(rows: Iterable[Any], columns: Columns) -> str:
    """A Markdown table with a line for each row; a column is a title and what it shows of a row (a dash for null)."""
    lines = [[*columns], ["---"] * len(columns), *([_text(show(row)) for show in columns.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def grid(
    corner: str,
    rows: Iterable[Any],
    columns: Iterable[Any],
    cell: Callable[[Any, Any], Any],
    *,
    row: Callable[[Any], str] = str,
    column: Callable[[Any], str] = str,
) -> str:
    """A Markdown table of `cell(row, column)`, with names for both."""
    named: dict[str, Callable[[Any], Any]] = {column(key): partial(_swap, cell, key) for key in columns}
    return table(rows, {corner: row, **named})


def facts(rows: Iterable[tuple[str, Any]]) -> str:
    """A table of two columns; facts that are null are left out."""
    return table(
        [row for row in rows if row[1] is not None], {"what": lambda row: row[0], "figure": lambda row: row[1]}
    )


def goal_table(rows: Iterable[tuple[str, str, bool, str]]) -> str:
    """A goal, whether it was reached, and what was measured."""
    return table(
        rows,
        {
            "what": lambda row: row[0],
            "goal": lambda row: row[1],
            "reached": lambda row: "yes" if row[2] else "no",
            "measured": lambda row: row[3],
        },
    )


def measured_on(results: Row) -> str:
    """The device, the versions, the days, and in how many runs if it was continued, as a line of its own."""
    environment = results["environment"]
    if "hardware" in results:
        device = HardwareSpec.model_validate(results["hardware"]).describe()
    else:
        device = f"{results['device']}, torch {environment['packages']['torch']}"
    days = dict.fromkeys(date[:10] for date in (environment["date"], *results.get("continued", ())))
    runs = f", in {1 + len(results['continued'])} runs" if results.get("continued") else ""
    return f"\nMeasured on {device}, {' and '.join(days)}{runs}.\n"


def percent(share: float | None, digits: int = 1) -> str:
    """`1.2%`, or a dash for null."""
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def ratio(value: float | None, digits: int = 2) -> str:
    """`1.23x`, or a dash for null."""
    return "-" if value is None else f"{value:.{digits}f}x"


def counted(counts: Mapping[str, int]) -> str:
    """`loop 3, bmm 1`, the most frequent first."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1])) or "none"


def _swap(cell: Callable[[Any, Any], Any], column: Any, row: Any) -> Any:
    return cell(row, column)


def _text(value: Any) -> str:
    return "-" if value is None or value == "" else str(value).replace("|", "\\|")
