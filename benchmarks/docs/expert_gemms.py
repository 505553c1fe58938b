"""The experts on quack's GEMMs and on the fused ones: whole FFNs in turns, and the tiles of quack's products."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.docs.results import Row, facts, grid, measured_on, percent, ratio, table

DEFAULT = "default"
CHOSEN = "chosen"


def quack(results: Row) -> str:
    """FFNs by the clock and on the device, then each product with quack's default tile and with the fastest one."""
    shown = table(
        results["experts"],
        {
            "model": _model,
            "back end": lambda row: row["backend"],
            "by the clock": lambda row: _times(row, "clock"),
            "on the device": lambda row: _times(row, "both"),
            "forward by the clock": lambda row: _times(row, "clock_forward"),
            "relative to compiled dense": lambda row: ratio(_dense(results, row) / row["clock"]),
            "kept": lambda row: f"{row['kept_GiB']:.2f} GiB",
        },
    )
    cells = {(_model(row), row["product"]): row["tiles"] for row in results["sweep"]}
    models = dict.fromkeys(place[0] for place in cells)
    tiles = grid(
        "product, TFLOP/s on the device",
        results["products"],
        models,
        lambda product, model: _tiles(cells[model, product]),
        row=lambda product: results["products"][product],
    )
    worst = max(error for errors in results["checks"].values() for error in errors.values())
    checked = facts([("largest relative error against float64, default tiles", f"{worst:.1e}")])
    where = results["environment"]
    versions = ", ".join(f"{name} {where['packages'][name]}" for name in ("quack-kernels", "nvidia-cutlass-dsl"))
    measured = f"Measured on {where['device']}, torch {where['torch']}, {versions}, {where['date']}.\n"
    return f"{shown}\n{tiles}\n{checked}\n{measured}"


def fused_choice(results: Row) -> str:
    """The chosen kernels' times, and their ratio to those of every other way: by the clock, and on the device."""
    rows = {(row["model"], row["layer"]["num_tokens"]): row for row in results["rows"]}
    ways = list(dict.fromkeys(way for row in rows.values() for way in row["seconds"]))
    shown = grid(
        "layer, tokens",
        rows,
        ways,
        lambda place, way: _choice(rows[place]["seconds"], way),
        row=lambda place: f"{place[0]}, {place[1]:,}",
    )
    timed = [each for row in rows.values() for each in row["seconds"].values()]
    spread = statistics.median(each["clock_error_seconds"] / each["clock_seconds"] for each in timed)
    figures = facts(
        [
            ("standard error of a time by the clock, median", percent(spread)),
            *((f"results of `{way}`", _difference(rows.values(), way)) for way in ways if way != CHOSEN),
        ]
    )
    return f"{shown}\n{figures}{measured_on(results)}"


def _difference(rows: Iterable[Row], way: str) -> str:
    """How far the results of a way are from those of the chosen one, at most."""
    parts = [row["errors"].items() for row in rows]
    worst = max(error for errors in parts for name, error in errors if name.rpartition(" ")[0] == way)
    return f"differ by {worst:.1e}, relative to the chosen one's" if worst else "the chosen one's, bit by bit"


def _choice(seconds: Row, way: str) -> str | None:
    if way not in seconds:  # it is the chosen one there
        return None
    clock, device = seconds[way]["clock_seconds"], seconds[way]["device_seconds"]
    if way == CHOSEN:
        return f"{clock * 1e3:.2f} ms ({device * 1e3:.2f})"
    chosen = seconds[CHOSEN]
    return f"{chosen['clock_seconds'] / clock:.2f} ({chosen['device_seconds'] / device:.2f})"


def _model(row: Row) -> str:
    return f"E={row['num_experts']} top_k={row['top_k']}"


def _times(row: Row, of: str) -> str:
    least, most = row["spread"][of.replace("_", " ")]
    return f"{row[of]:.1f} ms ({least:.1f} to {most:.1f})"


def _dense(results: Row, row: Row) -> float:
    rows = [other for other in results["experts"] if other["backend"].startswith("dense")]
    return float(next(other["clock"] for other in rows if _model(other) == _model(row)))


def _tiles(tiles: dict[str, Any]) -> str:
    timed = {name: tile["tflops"] for name, tile in tiles.items() if isinstance(tile, dict)}
    best = max(timed, key=timed.__getitem__)
    fastest = "" if best == DEFAULT else f", {timed[best]:.0f} with {best}"
    return f"{timed[DEFAULT]:.0f} by default{fastest}"
