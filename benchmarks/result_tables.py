"""Writes the tables beside the raw results: benchmarks/results/*.md, from the JSON.

    python -m benchmarks.result_tables            # writes them
    python -m benchmarks.result_tables --check    # fails if one is not current

`benchmarks/result_tables.yaml` says what they show. A cell is a format string over a row, and `-` where the row lacks
a value. Beyond Python's formats there are `GiB`, `MiB`, `ms` and `k`, which scale, `candidate`, `join` and `count`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import string
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import ROOT, kernels_digest

RESULTS = ROOT / "benchmarks" / "results"
SPECIFICATION = ROOT / "benchmarks" / "result_tables.yaml"
SCALES = {
    "GiB": (1 / (1 << 30), ".1f", " GiB"),
    "MiB": (1 / (1 << 20), ".0f", " MiB"),
    "ms": (1e3, ".1f", " ms"),
    "k": (1e-3, ".1f", "k"),
}

Row = dict[str, Any]


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            raise KeyError
        if format_spec in SCALES:
            scale, form, unit = SCALES[format_spec]
            return f"{value * scale:{form}}{unit}"
        shown = {"candidate": _candidate, "join": _join, "count": len}.get(format_spec)
        return format(value, format_spec) if shown is None else str(shown(value))


def render(table: Row) -> str:
    """Return a section: heading, table, figures, and where they come from."""
    result = load(table["from"])
    rows = list(rows_of(result, table["rows"]))
    below = [*_spreads(rows, table.get("spreads", {}))]
    below += [f"- {what}: {show(cell, result)}" for what, cell in table.get("facts", {}).items()]
    parts = [f"## {table['title']}", _grid(table, rows) if "by" in table else _list(table, rows), "\n".join(below)]
    return "\n\n".join([*filter(None, parts), origin(table["from"], result)]) + "\n"


def rows_of(result: Row, where: str) -> Iterable[Row]:
    """Return the rows at a path, or of a function. A path that ends in a dot is one row."""
    if call := re.fullmatch(r"(\w+)\((.*)\)", where):
        rows: Iterable[Row] = getattr(import_module("benchmarks.result_rows"), call[1])(
            result, *filter(None, [call[2]])
        )
        return rows
    at: Any = result
    for key in filter(None, where.split(".")):
        at = at[key]
    if where.endswith("."):
        return [at]
    return [{"name": name, **row} for name, row in at.items()] if isinstance(at, Mapping) else at


def show(cell: str, row: Row) -> str:
    try:
        return _Formatter().vformat(cell, (), row).replace("|", "\\|") or "-"
    except (KeyError, IndexError, TypeError):
        return "-"


@cache
def load(name: str) -> Row:
    result: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def origin(name: str, result: Row) -> str:
    """Return the file, the device, the day and the commit, as far as the result says them."""
    environment, hardware = result.get("environment", {}), result.get("hardware") or {}
    versions = hardware.get("versions") or environment.get("packages", {})
    number = hardware.get("num_devices") or result.get("num_devices") or 1
    device = hardware.get("device_name") or result.get("device")
    days = (environment.get("date"), *result.get("continued", ()))
    commit, kernels = result.get("commit"), result.get("kernels")
    parts = [
        f"[`{name}.json`]({name}.json)",
        device and f"{number} x {device}",
        versions.get("torch") and f"torch {versions['torch']}",
        " and ".join(dict.fromkeys(day[:10] for day in days if day)),
        isinstance(commit, str) and f"commit `{commit[:7]}`",
        kernels not in {None, kernels_digest()} and "**earlier expert kernels**",
    ]
    return f"From {', '.join(str(part) for part in parts if part)}."


def pages() -> dict[Path, str]:
    about = "Written by `python -m benchmarks.result_tables` from the JSON beside it.\n"
    texts = {}
    for page in yaml.safe_load(SPECIFICATION.read_text()):
        tables = [each for table in page["tables"] for each in _repeated(table)]
        text = "\n".join([f"# {page['title']}\n", about, *map(render, tables)])
        texts[RESULTS / f"{page['page']}.md"] = text
    return texts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if options.check:
            print(f"not current: {path.relative_to(ROOT)}")
        else:
            path.write_text(text)
    return int(options.check and bool(stale))


def _repeated(table: Row) -> list[Row]:
    """Return the table for each list of values, which take the places of $0, $1 and so on."""
    text = json.dumps({key: value for key, value in table.items() if key != "each"})
    return [
        json.loads(re.sub(r"\$(\d)", lambda match, values=values: values[int(match[1])], text))  # type: ignore[misc]  # a default of a lambda
        for values in table.get("each", [[]])
    ]


def _list(table: Row, rows: list[Row]) -> str:
    columns = table["columns"]
    return _markdown(list(map(str, columns)), [[show(cell, row) for cell in columns.values()] for row in rows])


def _grid(table: Row, rows: list[Row]) -> str:
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(show(table["by"], row), {})[show(table["column"], row)] = show(table["cell"], row)
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    return _markdown(
        [table.get("corner", ""), *names],
        [[line, *(cells.get(name, "-") for name in names)] for line, cells in lines.items()],
    )


def _spreads(rows: list[Row], spreads: Mapping[str, str]) -> Iterable[str]:
    for what, cell in spreads.items():
        values = [abs(float(value)) for row in rows if (value := show(cell, row)) != "-"]
        yield f"- {what}: median {statistics.median(values):.1%}, max {max(values):.1%} over {len(values)}"


def _markdown(heads: list[str], lines: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines])


def _candidate(candidate: Row) -> str:
    """`m=6, tile 2, recompute experts, cudnn, fused`, as far as it differs from the default."""
    tile, recompute = candidate.get("bta_tile"), candidate["recompute"]
    parts = [
        f"m={candidate['micro_batch_size']}",
        tile and f"tile {tile}",
        recompute != "none" and f"recompute {recompute}",
    ]
    return ", ".join(
        str(part) for part in [*parts, *map(candidate.get, ("attention_backend", "expert_backend", "sharding"))] if part
    )


def _join(parts: Mapping[str, Any] | list[str]) -> str:
    pairs = parts.items() if isinstance(parts, Mapping) else ((each, None) for each in parts)
    return "; ".join(str(name) if number is None else f"{name} {number}" for name, number in pairs)


if __name__ == "__main__":
    sys.exit(main())
