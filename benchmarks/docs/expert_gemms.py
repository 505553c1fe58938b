"""The experts on quack's GEMMs: whole FFNs beside others in turns, and each product's tiles."""

from __future__ import annotations

from typing import Any

from benchmarks.docs.results import Row, facts, grid, ratio, table

DEFAULT = "default"


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
