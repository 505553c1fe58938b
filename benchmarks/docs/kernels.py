"""Grouped GEMMs alone, and MoE layers against dense ones."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

from benchmarks.docs.results import GIB, Columns, Row, counted, facts, grid, measured_on, percent, ratio, table
from benchmarks.gemm_contenders import BASELINES, CHOSEN, OURS
from benchmarks.gemm_summary import ROOFLINE_SECONDS, device_seconds, wall_seconds
from benchmarks.moe_contenders import DENSE, LIGER, compiled_name
from benchmarks.moe_summary import GRAPH

KINDS = {"layer": "Whole MoE layers (norm, router, experts, combination)", "experts": "Expert FFNs alone"}
SHORT = {"operands_exceed_limit": "too large", "out_of_memory": "out of memory", "timed_out": "timed out"}
BOUND_SHARE = 0.3
"""From this share of a layer's time on, the bytes of the experts' matrices are shown as its bound."""
COMPILED = compiled_name("")
FUSED = ("fused", "auto")
DISAGREEING = 3.0
"""So many standard errors apart, the two clocks of a row saw different conditions."""
CLOCKS = {"device_relative_to_dense": "fastest on the device", "relative_to_dense": "fastest with the host"}


def grouped_gemm(results: Row) -> str:
    """Ours over the others by tokens an expert: on the device, and with the host."""
    cells, found = results["cells"], results["summary"]
    places = {((cell["experts"], cell["distribution"]), cell["tokens"]): cell for cell in cells}
    wrong = {run["name"] for cell in cells for run in cell["runs"] if run["outcome"] == "wrong"}
    timed, roofline = f"of {found['cells_timed']}", f"of {found['roofline_cells']}"
    shown = grid(
        "tokens an expert",
        sorted({cell["tokens"] for cell in cells}),
        dict.fromkeys(place for place, _ in places),
        lambda tokens, place: _cell(places.get((place, tokens), {})),
        column=lambda place: f"E={place[0]}, {place[1]}",
    )
    figures = [
        ("geometric mean, device alone", ratio(found["geometric_mean_ratio"], 3)),
        ("geometric mean, host included", ratio(found["geometric_mean_ratio_with_host"], 3)),
        ("worst cell, device alone", ratio(found["worst_ratio"])),
        ("worst cell, host included", ratio(found["worst_ratio_with_host"])),
        ("cells of at least 0.99x, device alone", f"{found['cells_at_least_0.99']} {timed}"),
        ("cells of at least 0.99x, host included", f"{found['cells_at_least_0.99_with_host']} {timed}"),
        ("against the standard error of the device's time", counted(found["verdicts"])),
        ("cells that reach the roofline goal, peak of an instant", f"{found['roofline_cells_reached']} {roofline}"),
        ("cells that reach it, sustained rate", f"{found['sustained_roofline_cells_reached']} {roofline}"),
        ("peak of an instant", f"{results['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"),
        ("sustained at 8192^3", _sustained(results["sustained"])),
        ("fastest on the device", counted(Counter(_fastest(cell, device_seconds) for cell in cells))),
        ("fastest with the host", counted(Counter(_fastest(cell, wall_seconds) for cell in cells))),
        ("wrong results", ", ".join(sorted(wrong)) or "none"),
        ("cells left out for want of time", found["cells"] - found["cells_timed"] or None),
    ]
    return shown + "\n" + facts(figures) + measured_on(results)


def auto_gemm(results: Row) -> str:
    """The fastest stock time over that of `auto` by tokens an expert: by the clock, and on the device."""
    cells = [cell for cell in results["cells"] if "auto_ratio" in cell]
    places = {((cell["experts"], cell["distribution"]), cell["tokens"]): cell for cell in cells}
    found, told = (results["summary"].get(name, {}) for name in ("auto", "auto_counted"))
    wrong = {run["name"] for cell in cells for run in cell["runs"] if run["outcome"] == "wrong"}
    shown = grid(
        "tokens an expert",
        sorted({cell["tokens"] for cell in cells}),
        dict.fromkeys(place for place, _ in sorted(places)),
        lambda tokens, place: _auto_cell(places.get((place, tokens))),
        column=lambda place: f"E={place[0]}, {place[1]}",
    )
    timed = f"of {len(cells)}"
    figures: list[tuple[str, Any]] = []
    for suffix, what in (("_with_host", "by the clock"), ("", "on the device")):
        figures += [
            (f"geometric mean, {what}", ratio(found.get(f"geometric_mean_ratio{suffix}"), 3)),
            (f"worst cell, {what}", ratio(found.get(f"worst_ratio{suffix}"))),
            (f"cells of at least 0.99x, {what}", f"{found.get(f'cells_at_least_0.99{suffix}', 0)} {timed}"),
        ]
    if told:  # older results have no such contender
        worst, reached = ratio(told["worst_ratio_with_host"]), told["cells_at_least_0.99_with_host"]
        mean = ratio(told["geometric_mean_ratio_with_host"], 3)
        figures.append(("told the counts as `bmm` is, by the clock", f"{mean}, worst {worst}, {reached} {timed} cells"))
    stock = Counter(_fastest(cell, wall_seconds, BASELINES) for cell in cells)
    figures += [
        ("standard error of a cell's ratio by the clock, median", percent(_median_error(cells))),
        ("fastest stock one by the clock", counted(stock)),
        ("seconds spent on the table of `auto`", f"{results['table_seconds']:.0f}"),
        ("wrong results", ", ".join(sorted(wrong)) or "none"),
        ("cells left out for want of time", len(results["cells"]) - len(cells) or None),
    ]
    return shown + "\n" + facts(figures) + measured_on(results)


def variable_gemm(results: Row) -> str:
    """Rates on the whole card, what fits within the limit, and uneven loads against even ones."""
    groups = results["contenders"]
    names = [*groups["baselines"], *groups["ours"], *groups.get("chosen", ())]
    dtypes = list(dict.fromkeys(run["dtype"] for run in results["runs"]))
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for run in results["runs"]:
        key = run["case"], run["limit_bytes"] is not None, run["contender"], run["dtype"]
        runs.setdefault(key, []).append(run)

    def shown(limited: bool, show: Callable[[list[Row]], str]) -> str:
        cases = [case for case in results["cases"] if any(key[:2] == (case, limited) for key in runs)]

        def cell(case: str, name: str) -> str:
            return " / ".join(show(runs.get((case, limited, name, dtype), [])) for dtype in dtypes)

        return grid("case", cases, names, cell) if cases else ""

    say = [
        f"TFLOP/s in {' / '.join(dtypes)}, on the device; in brackets by wall-clock where the host takes longer:\n\n"
    ]
    say += [shown(False, _rate), "\n"]
    if limited := shown(True, _outcome):
        say += [f"Within {results['limit_bytes'] >> 30} GiB:\n\n", limited, "\n"]
    figures: list[tuple[str, Any]] = []
    for of, what in (("forward", "forward"), ("training", "forward and backward")):
        part = results["summary"][of]
        figures += [
            (f"{what}: cells in which one of ours passes", f"{part['cells_passed_by_ours']} of {part['cells']}"),
            (f"{what}: cells passed", counted({name: part["outcomes"][name].get("ok", 0) for name in names})),
            (f"{what}: out of memory", counted(Counter(row["contender"] for row in part["out_of_memory"]))),
        ]
    figures += [("runs left out for want of time", len(results["left_out"]) or None)]
    if uneven := results["summary"]["uneven_over_even"]:
        say += ["The uneven distribution's time over the even one's, for as many rows:\n\n", _uneven(uneven), "\n"]
    return "".join(say) + facts(figures) + measured_on(results)


def moe_layer(results: Row) -> str:
    """At the largest micro-batch by back end, then the fastest back end by micro-batch."""
    say = []
    for kind, what in KINDS.items():
        rows = [row for row in results["rows"] if row["kind"] == kind]
        sizes = sorted({row["micro_batch_size"] for row in rows})
        if not rows:
            continue
        largest = [row for row in rows if row["micro_batch_size"] == sizes[-1]]
        say += [f"{what} at micro-batch {sizes[-1]}:\n\n", table(_sorted(largest), _BACK_END), "\n"]
        if len(sizes) > 1:
            places = dict.fromkeys((_model(row), str(row["micro_batch_size"])) for row in rows)
            timed = [place for place in places if _best(rows, place, "relative_to_dense")]
            by_size = grid(
                "model", timed, CLOCKS, partial(_best, rows), row=" m=".join, column=lambda clock: CLOCKS[clock]
            )
            say += ["The fastest back end by micro-batch, device alone / host included:\n\n", by_size, "\n"]
    errors = [row["error"] for row in results["errors"]]
    worst = math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)
    return "".join(say) + facts([("largest relative error against float64", f"{worst:.1e}")]) + measured_on(results)


def moe_turns(results: Row) -> str:
    """Milliseconds by the clock and throughput relative to dense, a line a model and micro-batch."""
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in results["rows"]:
        if "seconds" in row:
            cells.setdefault((_model(row), row["micro_batch_size"]), []).append(row)
    choices: dict[str, Callable[[Row], bool]] = {
        "dense": lambda row: row["backend"] in DENSE,
        "fastest stock": lambda row: row["backend"].removesuffix(COMPILED) in BASELINES,
        "liger": lambda row: row["backend"] == LIGER,
        "fastest back end": lambda row: not row["backend"].endswith(GRAPH) and not row["backend"].startswith("dense"),
        "`auto`": lambda row: row["backend"] == "auto",
        "dense graph": lambda row: row["backend"].removesuffix(GRAPH) in DENSE and row["backend"].endswith(GRAPH),
        "fastest stock graph": lambda row: row["backend"].endswith(GRAPH) and _kernels_of(row) in BASELINES,
        "fastest graph": lambda row: row["backend"].endswith(GRAPH) and not row["backend"].startswith("dense"),
    }

    def cell(place: tuple[str, int], choice: str) -> str | None:
        rows = [row for row in cells[place] if choices[choice](row)]
        return _layer_times(min(rows, key=lambda row: float(row["seconds"]))) if rows else None

    kinds = [kind for kind, is_one in choices.items() if any(is_one(row) for rows in cells.values() for row in rows)]
    shown = grid("layer", sorted(cells), kinds, cell, row=lambda place: f"{place[0]} m={place[1]}")
    errors = [row["error"] for row in results["errors"]]
    figures: list[tuple[str, Any]] = [
        ("largest relative error against float64", f"{max(errors):.1e}" if errors else "not compared in this run"),
        ("standard error of a time by the clock, median and largest", _spread_of(cells)),
        *((f"`fused`, compiled and as `auto`, of dense at {place}", shares) for place, shares in _of_fused(cells)),
        ("cells left out for want of time", len(results.get("left_out", ())) or None),
        ("by the clock faster than on the device, so under other conditions", "; ".join(_disagreeing(cells)) or None),
    ]
    return shown + "\n" + facts(figures) + measured_on(results)


def _kernels_of(row: Row) -> str:
    """The back end without how it is run."""
    return str(row["backend"].removesuffix(GRAPH).removesuffix(COMPILED))


def _of_fused(cells: dict[tuple[str, int], list[Row]]) -> Iterator[tuple[str, str]]:
    """The least and the most of dense at the largest micro-batch, where these run the same expert kernels."""
    largest = max((micro_batch for _, micro_batch in cells), default=0)
    for (model, micro_batch), rows in sorted(cells.items()):
        ours = [row for row in rows if not row["backend"].endswith(GRAPH) and _kernels_of(row) in FUSED]
        if micro_batch == largest and ours:
            clock, device = (
                f"{min(found):.2f}x to {max(found):.2f}x"
                for found in ([row[of] for row in ours] for of in ("relative_to_dense", "device_relative_to_dense"))
            )
            yield f"{model} m={micro_batch}", f"{clock} by the clock, {device} on the device"


def _spread_of(cells: dict[tuple[str, int], list[Row]]) -> str | None:
    shares = [
        row["clock_error_seconds"] / row["seconds"]
        for rows in cells.values()
        for row in rows
        if row.get("clock_error_seconds")
    ]
    return f"{percent(statistics.median(shares))}, {percent(max(shares))}" if shares else None


def _disagreeing(cells: dict[tuple[str, int], list[Row]]) -> Iterator[str]:
    """What took less time by the clock than on the device, by more than three standard errors."""
    for (model, micro_batch), rows in cells.items():
        for row in rows:
            error = math.hypot(row.get("clock_error_seconds", 0.0), row.get("device_error_seconds", 0.0))
            if row["device_seconds"] - row["seconds"] > DISAGREEING * error > 0:
                times = f"{row['seconds'] * 1e3:.3g} ms (device {row['device_seconds'] * 1e3:.3g})"
                yield f"{row['backend']} {times} at {model} m={micro_batch}"


def _layer_times(row: Row) -> str:
    """`fused 1.23 ms (device 1.2), 0.95x`, and the share of the bound by the experts' bytes where that is the limit."""
    times = f"{row['seconds'] * 1e3:.3g} ms (device {row['device_seconds'] * 1e3:.3g})"
    if row["backend"].startswith("dense"):
        return f"{row['backend'].removesuffix(GRAPH)} {times}"
    bound = row.get("bound_seconds") or 0.0
    share = (
        f", {percent(bound / row['seconds'], 0)} of the bytes' bound" if bound > BOUND_SHARE * row["seconds"] else ""
    )
    return f"{row['backend'].removesuffix(GRAPH)} {times}, {ratio(row.get('relative_to_dense'))}{share}"


def _auto_cell(cell: Row | None) -> str | None:
    return None if cell is None else f"{cell['auto_ratio_with_host']:.2f} ({cell['auto_ratio']:.2f})"


def _median_error(cells: list[Row]) -> float | None:
    """The relative standard error of `auto`'s and the fastest stock one's times by the clock, together."""
    errors = []
    for cell in cells:
        timed = [run for run in cell["runs"] if run["outcome"] == "ok"]
        stock = min((run for run in timed if run["name"] in BASELINES), key=wall_seconds)
        pair = (stock, *(run for run in timed if run["name"] in CHOSEN))
        errors.append(math.hypot(*(run["clock_error_seconds"] / run["clock_seconds"] for run in pair)))
    return statistics.median(errors) if errors else None


def _model(row: Row) -> str:
    return f"E={row['num_experts']} top_k={row['top_k']}"


_BACK_END: Columns = {
    "model": _model,
    "back end": lambda row: row["backend"],
    "device alone": lambda row: ratio(row.get("device_relative_to_dense")),
    "host included": lambda row: ratio(row.get("relative_to_dense")),
    "saved activations": lambda row: f"{row['saved_bytes'] / GIB:.2f} GiB",
}


def _sorted(rows: list[Row]) -> list[Row]:
    """The rows of models with more than dense layers, each model's fastest on the device first."""
    timed = [row for row in rows if "device_relative_to_dense" in row]
    models = list(dict.fromkeys(_model(row) for row in timed if row["backend"] not in DENSE))
    timed = [row for row in timed if _model(row) in models]
    return sorted(timed, key=lambda row: (models.index(_model(row)), -row["device_relative_to_dense"]))


def _best(rows: list[Row], place: tuple[str, str], clock: str) -> str | None:
    """The fastest by one of the two clocks: its name, and both ratios; null where fewer than two were timed."""
    mine = [row for row in rows if (_model(row), str(row["micro_batch_size"])) == place]
    mine = [row for row in mine if row["backend"] not in DENSE and "relative_to_dense" in row]
    if len(mine) < 2:
        return None
    best = max(mine, key=lambda row: float(row[clock]))
    return f"{best['backend']} {ratio(best['device_relative_to_dense'])} / {ratio(best['relative_to_dense'])}"


def _cell(cell: Row) -> str | None:
    if "ratio" not in cell:
        return None
    share = f", {percent(cell['roofline_share'], 0)}" if cell["roofline_seconds"] > ROOFLINE_SECONDS else ""
    level = " level" if cell["verdict"] == "level" else ""
    return f"{cell['ratio']:.2f}{level} ({cell['ratio_with_host']:.2f}){share}"


def _sustained(found: Row) -> str:
    """Rate, clock and power of a card that never rests."""
    parts = [f"{found['flops_per_second'] / 1e12:.0f} TFLOP/s"]
    parts += [f"{found['clock_mhz']:.0f} MHz"] if found["clock_mhz"] is not None else []
    if found["power_watts"] is not None and found["power_limit_watts"] is not None:
        parts.append(f"{found['power_watts']:.0f} of {found['power_limit_watts']:.0f} W")
    return ", ".join(parts)


def _fastest(cell: Row, seconds: Callable[[Row], float], names: Container[str] = BASELINES | OURS) -> str:
    runs = [run for run in cell["runs"] if run["outcome"] == "ok" and run["name"] in names]
    return str(min(runs, key=seconds)["name"]) if runs else "not timed"


def _rate(runs: list[Row]) -> str:
    timed = [run["training"] for run in runs if "flops_per_second" in run["training"]]
    if not timed:
        return _outcome(runs)
    flops = statistics.mean(run["flops_per_second"] for run in timed)
    slower = [wall_seconds({"host_seconds": 0.0} | run) / run["seconds"] for run in timed if "seconds" in run] or [1.0]
    wall = flops / statistics.mean(slower)
    return f"{flops / 1e12:.0f}" + (f" ({wall / 1e12:.0f})" if wall < 0.995 * flops else "")


def _outcome(runs: list[Row]) -> str:
    if not runs:
        return "-"
    training, forward = str(runs[0]["training"]["outcome"]), str(runs[0]["forward"]["outcome"])
    if training != "ok" and forward == "ok":
        return "forward"
    return SHORT.get(forward if forward == "out_of_memory" else training, training)


def _uneven(rows: list[Row]) -> str:
    cells = {(row["contender"], row["dtype"], row["of"]): f"{row['ratio']:.2f} {row['verdict']}" for row in rows}
    places, names = dict.fromkeys(key[1:] for key in cells), dict.fromkeys(key[0] for key in cells)
    return grid("back end", names, places, lambda name, place: cells.get((name, *place)), column=", ".join)
