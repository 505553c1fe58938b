"""Grouped GEMMs alone, and MoE layers against dense ones."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import Any

from benchmarks.docs.results import GIB, Columns, Row, counted, facts, measured_on, percent, ratio, table
from benchmarks.gemm_contenders import BASELINES, OURS
from benchmarks.gemm_summary import ROOFLINE_SECONDS, wall_seconds
from benchmarks.moe_contenders import DENSE

COMPILED = " compile"
KINDS = {"layer": "Whole MoE layers (norm, router, experts, combination)", "experts": "Expert FFNs alone"}
SHORT = {"operands_exceed_limit": "too large", "out_of_memory": "out of memory", "timed_out": "timed out"}


def grouped_gemm(results: Row) -> str:
    """Ours over the others by tokens an expert: on the device, and with the host."""
    cells, found = results["cells"], results["summary"]
    by_place = {(cell["tokens"], cell["experts"], cell["distribution"]): cell for cell in cells}
    places = dict.fromkeys((cell["experts"], cell["distribution"]) for cell in cells)
    columns = {f"E={e}, {load}": lambda t, e=e, load=load: _cell(by_place.get((t, e, load), {})) for e, load in places}
    wrong = {run["name"] for cell in cells for run in cell["runs"] if run["outcome"] == "wrong"}
    return (
        table(sorted({cell["tokens"] for cell in cells}), {"tokens an expert": str} | columns)
        + "\n"
        + facts(
            [
                ("geometric mean, device alone", ratio(found["geometric_mean_ratio"], 3)),
                ("geometric mean, host included", ratio(found["geometric_mean_ratio_with_host"], 3)),
                ("worst cell, device alone", ratio(found["worst_ratio"])),
                ("worst cell, host included", ratio(found["worst_ratio_with_host"])),
                ("cells of at least 0.99x, device alone", _of(found, "cells_at_least_0.99")),
                ("cells of at least 0.99x, host included", _of(found, "cells_at_least_0.99_with_host")),
                ("against the standard error of the device's time", counted(found["verdicts"])),
                ("cells that reach the roofline goal, peak of an instant", _roofline(found, "roofline")),
                ("cells that reach it, rate that the card sustains", _roofline(found, "sustained_roofline")),
                ("peak of an instant", f"{results['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"),
                ("sustained at 8192^3", _sustained(results["sustained"])),
                ("fastest on the device", counted(Counter(_fastest(cell) for cell in cells if cell["runs"]))),
                (
                    "fastest with the host",
                    counted(Counter(_fastest(cell, host=True) for cell in cells if cell["runs"])),
                ),
                ("wrong results", ", ".join(sorted(wrong)) or "none"),
                ("cells left out for want of time", found["cells"] - found["cells_timed"] or None),
            ]
        )
        + measured_on(results)
    )


def variable_gemm(results: Row) -> str:
    """Rates on the whole card, what fits within the limit, and uneven loads against even ones."""
    names = [*results["contenders"]["baselines"], *results["contenders"]["ours"]]
    dtypes = list(dict.fromkeys(run["dtype"] for run in results["runs"]))
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for run in results["runs"]:
        key = run["case"], run["limit_bytes"] is not None, run["contender"], run["dtype"]
        runs.setdefault(key, []).append(run)

    def cases(limited: bool) -> list[str]:
        return [case for case in results["cases"] if any(key[:2] == (case, limited) for key in runs)]

    def columns(limited: bool, show: Any) -> dict[str, Any]:
        return {
            name: lambda case, name=name: " / ".join(show(runs.get((case, limited, name, d), [])) for d in dtypes)
            for name in names
        }

    say = [
        f"TFLOP/s in {' / '.join(dtypes)}, on the device; in brackets by wall-clock where the host takes longer:\n\n",
        table(cases(False), {"case": str} | columns(False, _rate)),
    ]
    if limited := cases(True):
        say += [f"\nWithin {results['limit_bytes'] >> 30} GiB:\n\n"]
        say += [table(limited, {"case": str} | columns(True, _outcome))]
    for of, what in (("forward", "forward"), ("training", "forward and backward")):
        part = results["summary"][of]
        passed = {name: part["outcomes"][name].get("ok", 0) for name in names}
        exhausted = Counter(row["contender"] for row in part["out_of_memory"])
        say += ["\n"] + [
            facts(
                [
                    (
                        f"{what}: cells in which one of ours passes",
                        f"{part['cells_passed_by_ours']} of {part['cells']}",
                    ),
                    (f"{what}: cells passed by back end", counted(passed)),
                    (f"{what}: out of memory", counted(exhausted)),
                ]
            )
        ]
    if uneven := results["summary"]["uneven_over_even"]:
        say += ["\nThe uneven distribution's time over the even one's, for as many rows:\n\n", _uneven(uneven)]
    left_out = f"\nFor want of time {len(results['left_out'])} runs were left out.\n" if results["left_out"] else ""
    return "".join(say) + left_out + measured_on(results)


def moe_layer(results: Row) -> str:
    """At the largest micro-batch by back end, then the fastest back end by micro-batch."""
    say = []
    for kind, what in KINDS.items():
        rows = [row for row in results["rows"] if row["kind"] == kind]
        if not rows:
            continue
        sizes = sorted({row["micro_batch_size"] for row in rows})
        largest = [row for row in rows if row["micro_batch_size"] == sizes[-1]]
        say += [f"{what} at micro-batch {sizes[-1]}:\n\n", table(_timed(largest), _BACK_END), "\n"]
        if len(sizes) > 1:
            places = dict.fromkeys((_model(row), row["micro_batch_size"]) for row in rows)
            columns: Columns = {
                "model": lambda place: place[0],
                "m": lambda place: place[1],
                "fastest on the device": lambda place, rows=rows: _best(rows, place, "device_relative_to_dense"),
                "fastest with the host": lambda place, rows=rows: _best(rows, place, "relative_to_dense"),
            }
            timed = [place for place in places if _best(rows, place, "relative_to_dense")]
            say += [
                "The fastest back end by micro-batch, device alone / host included:\n\n",
                table(timed, columns),
                "\n",
            ]
    errors = [row["error"] for row in results["errors"]]
    worst = math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)
    return "".join(say) + facts([("largest relative error against float64", f"{worst:.1e}")]) + measured_on(results)


_BACK_END = {
    "model": _model,
    "back end": lambda row: row["backend"],
    "device alone": lambda row: ratio(row.get("device_relative_to_dense")),
    "host included": lambda row: ratio(row.get("relative_to_dense")),
    "saved activations": lambda row: f"{row['saved_bytes'] / GIB:.2f} GiB",
}


def _model(row: Row) -> str:
    return f"E={row['num_experts']} top_k={row['top_k']}"


def _timed(rows: list[Row]) -> list[Row]:
    """The rows of models with more than dense layers, each model's fastest on the device first."""
    timed = [row for row in rows if "device_relative_to_dense" in row]
    models = list(dict.fromkeys(_model(row) for row in timed if row["backend"] not in DENSE))
    timed = [row for row in timed if _model(row) in models]
    return sorted(timed, key=lambda row: (models.index(_model(row)), -row["device_relative_to_dense"]))


def _best(rows: list[Row], place: tuple[str, int], key: str) -> str | None:
    """The fastest by one of the two clocks: its name, and both ratios; null where fewer than two were timed."""
    mine = [row for row in rows if (_model(row), row["micro_batch_size"]) == place]
    mine = [row for row in mine if row["backend"] not in DENSE and "relative_to_dense" in row]
    if len(mine) < 2:
        return None
    best = max(mine, key=lambda row: float(row[key]))
    return f"{best['backend']} {ratio(best['device_relative_to_dense'])} / {ratio(best['relative_to_dense'])}"


def _cell(cell: Row) -> str | None:
    if "ratio" not in cell:
        return None
    shown = f", {percent(cell['roofline_share'], 0)}" if cell["roofline_seconds"] > ROOFLINE_SECONDS else ""
    level = " level" if cell["verdict"] == "level" else ""
    return f"{cell['ratio']:.2f}{level} ({cell['ratio_with_host']:.2f}){shown}"


def _of(found: Row, key: str) -> str:
    return f"{found[key]} of {found['cells_timed']}"


def _roofline(found: Row, key: str) -> str:
    return f"{found[f'{key}_cells_reached']} of {found['roofline_cells']}"


def _sustained(found: Row) -> str:
    """Rate, clock and power of a card that never rests."""
    parts = [f"{found['flops_per_second'] / 1e12:.0f} TFLOP/s"]
    parts += [f"{found['clock_mhz']:.0f} MHz"] if found["clock_mhz"] is not None else []
    if found["power_watts"] is not None and found["power_limit_watts"] is not None:
        parts.append(f"{found['power_watts']:.0f} of {found['power_limit_watts']:.0f} W")
    return ", ".join(parts)


def _fastest(cell: Row, *, host: bool = False) -> str:
    runs = [run for run in cell["runs"] if run["outcome"] == "ok" and run["name"] in BASELINES | OURS]
    return str(min(runs, key=wall_seconds if host else lambda run: float(run["seconds"]))["name"]) if runs else "none"


def _rate(runs: list[Row]) -> str:
    timed = [run["training"] for run in runs if "flops_per_second" in run["training"]]
    if not timed:
        return _outcome(runs)
    flops = statistics.mean(run["flops_per_second"] for run in timed)
    wall = statistics.mean(
        run["flops_per_second"] * run["seconds"] / max(run["seconds"], run.get("host_seconds", 0.0)) for run in timed
    )
    return f"{flops / 1e12:.0f}" + (f" ({wall / 1e12:.0f})" if wall < 0.995 * flops else "")


def _outcome(runs: list[Row]) -> str:
    if not runs:
        return "-"
    training, forward = runs[0]["training"]["outcome"], runs[0]["forward"]["outcome"]
    if training != "ok" and forward == "ok":
        return "forward"
    return SHORT.get(forward if forward == "out_of_memory" else training, training)


def _uneven(rows: list[Row]) -> str:
    cells = {(row["contender"], row["dtype"], row["of"]): f"{row['ratio']:.2f} {row['verdict']}" for row in rows}
    places = dict.fromkeys((row["dtype"], row["of"]) for row in rows)
    columns = {f"{dtype}, {of}": lambda name, d=dtype, of=of: cells.get((name, d, of)) for dtype, of in places}
    return table(dict.fromkeys(row["contender"] for row in rows), {"back end": str} | columns)
