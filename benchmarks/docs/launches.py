"""What the expert kernels cost the host, in units of one small operation."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.docs.results import Row, table
from benchmarks.launch_cost import NOTHING

GEMM_GOAL, LAYER_GOAL = 1.5, 8.0


def launch_cost(results: Row) -> str:
    """The least and the most over the shapes, as multiples of the unit."""
    layers = [row["launches"] for row in results["layers"]]
    kernels = {
        f"a grouped GEMM of `{name}`, or its sum over rows": units for name, units in gemm_units(results).items()
    }
    forward, backward = (_units(layers, f"fused: {part} without autograd") for part in ("forward", "backward"))
    bare = {"`fused`, forward and backward without autograd": layer_units(results)}
    rest = {
        "`fused`, its forward without autograd": forward,
        "`fused`, its backward without autograd": backward,
        "`fused`, a layer in a chain, with autograd": _units(layers, "fused, a layer in a chain"),
        "an autograd function that launches nothing, in a chain": _units(layers, f"{NOTHING}, a layer in a chain"),
        "`fused`, one layer alone, with autograd": _units(layers, "fused forward and backward"),
        "an autograd function that launches nothing, alone": _units(layers, f"{NOTHING}, forward and backward"),
    }
    goals = dict.fromkeys(kernels, GEMM_GOAL) | dict.fromkeys(bare, LAYER_GOAL)
    micros = results["launch_us"]
    columns: dict[str, Callable[[tuple[str, list[float]]], object]] = {
        "what": lambda row: row[0],
        "units": lambda row: _range(row[1], ".1f"),
        "microseconds": lambda row: _range([units * micros for units in row[1]], ".0f"),
        "goal in units": lambda row: goals.get(row[0]),
    }
    shown = table((kernels | bare | rest).items(), columns)
    torch = results["environment"]["packages"]["torch"]
    date = results["environment"]["date"][:10]
    return f"{shown}\nA unit was {micros:.1f} us. Measured on {results['device']}, torch {torch}, {date}.\n"


def gemm_units(results: Row) -> dict[str, list[float]]:
    """The units of each back end's products, over the shapes."""
    rows = [row["launches"] for row in results["gemms"]]
    return {
        name: _units(rows, f"{name} multiply_rows", f"{name} sum_over_rows")
        for name in ("hopper_grouped", "triton_grouped")
    }


def layer_units(results: Row) -> list[float]:
    """The units of a fused layer's forward and backward without autograd, over the shapes."""
    rows = [row["launches"] for row in results["layers"]]
    parts = (_units(rows, f"fused: {part} without autograd") for part in ("forward", "backward"))
    return [sum(pair) for pair in zip(*parts, strict=True)]


def _units(rows: list[Row], *names: str) -> list[float]:
    return [row[name] for row in rows for name in names]


def _range(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"
