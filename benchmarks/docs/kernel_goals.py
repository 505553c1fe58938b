"""The goals for expert kernels, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.docs.launches import GEMM_GOAL, LAYER_GOAL, gemm_units, layer_units
from benchmarks.docs.results import Row, find, goal_table, percent, ratio
from benchmarks.environment import is_of_these_kernels
from benchmarks.moe_contenders import DENSE
from benchmarks.moe_summary import GRAPH

Goal = tuple[str, str, bool, str]
DEVICE_MEAN, CLOCK_MEAN, WORST = 1.15, 1.12, 0.99
LARGE = {(8, 2, 64): 0.95, (128, 1, 64): 0.9}
GRAPHS = {(8, 2, 1): 0.5, (8, 2, 4): 0.8}
BOUND_GRAPHS = ((128, 1, 1), (128, 1, 4))
BOUND_SHARE = 0.85


def goals() -> str:
    """Return a line for each goal whose result is recorded. It says if the kernels were earlier ones."""
    sources: tuple[tuple[str, Callable[[Row], Iterator[Goal]]], ...] = (
        ("h200-grouped-gemm", of_device),
        ("h100-grouped-gemm", of_auto),
        ("h100-moe-turns", of_layers),
        ("h100-launch-cost", of_launches),
    )
    rows: list[Goal] = []
    for name, render in sources:
        if (found := find(name)) is not None:
            age = "" if is_of_these_kernels(found) else " (earlier kernels)"
            rows += [(what, goal, met, text + age) for what, goal, met, text in render(found)]
    return goal_table(rows) if rows else ""


def of_device(results: Row) -> Iterator[Goal]:
    """Our best grouped GEMM over the best stock one, on the device."""
    found = results["summary"]
    cells = f"{found['cells_at_least_0.99']} of {found['cells_timed']} cells"
    yield from _gemm("our best, on the device", found, "", DEVICE_MEAN, cells)


def of_auto(results: Row) -> Iterator[Goal]:
    """`auto` over the best stock one, by the clock."""
    found = results["summary"]["auto"]
    timed = sum("auto_ratio" in cell for cell in results["cells"])
    yield from _gemm(
        "`auto`, by the clock",
        found,
        "_with_host",
        CLOCK_MEAN,
        f"{found['cells_at_least_0.99_with_host']} of {timed} cells",
    )


def _gemm(what: str, found: Row, suffix: str, goal: float, cells: str) -> Iterator[Goal]:
    mean, worst = found[f"geometric_mean_ratio{suffix}"], found[f"worst_ratio{suffix}"]
    name = f"grouped GEMM over the fastest stock one: {what}"
    yield f"{name}, geometric mean", f">= {goal}", mean >= goal, ratio(mean, 3)
    yield f"{name}, worst cell", f">= {WORST}", worst >= WORST, f"{ratio(worst)}; {cells} reach it"


def of_layers(results: Row) -> Iterator[Goal]:
    """The fastest MoE layer of each kind, relative to dense or to the bound by the bytes of the experts' matrices."""
    for cell, goal in LARGE.items():
        rows = [row for row in _timed(results, cell) if not row["backend"].endswith(GRAPH)]
        yield from _best(cell, "by the clock", rows, goal)
    for cell, goal in GRAPHS.items():
        yield from _best(
            cell, "as CUDA graphs", [r for r in _timed(results, cell) if r["backend"].endswith(GRAPH)], goal
        )
    for cell in BOUND_GRAPHS:
        rows = [row for row in _timed(results, cell) if row["backend"].endswith(GRAPH)]
        if rows:
            row = min(rows, key=lambda row: float(row["seconds"]))
            share = row["bound_seconds"] / row["seconds"]
            text = f"{percent(share, 0)} by {row['backend']}"
            yield (
                f"{_name(cell)} as CUDA graphs, of the bytes' bound",
                f">= {BOUND_SHARE:.0%}",
                share >= BOUND_SHARE,
                text,
            )


def of_launches(results: Row) -> Iterator[Goal]:
    """What launches cost the host, in units of one small operation."""
    for what, goal, units in (
        (
            "a grouped GEMM's launch, units of one operation",
            GEMM_GOAL,
            [u for each in gemm_units(results).values() for u in each],
        ),
        ("`fused`, forward and backward without autograd, the same units", LAYER_GOAL, layer_units(results)),
    ):
        yield what, f"<= {goal}", max(units) <= goal, f"{min(units):.1f} to {max(units):.1f}"


def _timed(results: Row, cell: tuple[int, int, int]) -> list[Row]:
    """The rows of a cell that are MoE layers."""
    keys = ("num_experts", "top_k", "micro_batch_size")
    rows = [row for row in results["rows"] if tuple(row[key] for key in keys) == cell and "seconds" in row]
    return [row for row in rows if row["backend"].removesuffix(GRAPH) not in DENSE]


def _best(cell: tuple[int, int, int], how: str, rows: list[Row], goal: float) -> Iterator[Goal]:
    if rows:
        row = max(rows, key=lambda row: float(row["relative_to_dense"]))
        share = row["relative_to_dense"]
        device = f"{ratio(row['device_relative_to_dense'])} on the device"
        text = f"{ratio(share)} by {row['backend']}, the best of {len(rows)}; {device}"
        yield f"MoE layer of dense, {_name(cell)}, {how}", f">= {goal}x", share >= goal, text


def _name(cell: tuple[int, int, int]) -> str:
    return f"E={cell[0]} top_k={cell[1]} m={cell[2]}"
