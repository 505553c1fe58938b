"""Grouped GEMMs alone."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from benchmarks.gemm_contenders import OURS
from benchmarks.readme.results import left_out, measured_on, table

ROOFLINE_SHOWN_SECONDS = 2e-4
"""A cell below this is launches and latency; its share of the roofline says little."""


def grouped_gemm(results: dict[str, Any], name: str) -> str:
    """Ours over the others by tokens an expert, a column for every number of experts and load."""
    cells = results["cells"]
    columns = list(dict.fromkeys((cell["experts"], cell["distribution"]) for cell in cells))
    found = {(cell["tokens"], cell["experts"], cell["distribution"]): cell for cell in cells}
    rows = [
        [str(tokens), *(_ratio(found.get((tokens, *column), {})) for column in columns)]
        for tokens in sorted({cell["tokens"] for cell in cells})
    ]
    runs = [run for cell in cells for run in cell["runs"]]
    fastest = Counter(_fastest(cell["runs"]) for cell in cells if cell["runs"])
    wrong = sorted({run["name"] for run in runs if run["outcome"] == "wrong"})
    summary = results["summary"]
    say = [
        f"A grouped GEMM alone, ({results['k']}, {results['n']}) in bfloat16, forward and backward: the time of the "
        "fastest of `loop`, `bmm` and `grouped_mm` over that of the fastest of ours, on the device with launches "
        "queued ahead (what waits for the device includes its host), and in brackets the share of the "
        f"roofline where that exceeds {1e6 * ROOFLINE_SHOWN_SECONDS:.0f} us "
        f"(`python -m benchmarks.kernels --out benchmarks/results/{name}.json`):\n\n",
        table(["tokens an expert", *(f"E={experts}, {load}" for experts, load in columns)], rows),
        f"\nGeometric mean {summary['geometric_mean_ratio']:.3f}, worst {summary['worst_ratio']:.2f}; at least 0.99 in "
        f"{summary['cells_at_least_0.99']} of {summary['cells_timed']} cells. The roofline goal (85% from 512 tokens "
        f"an expert on, 70% below) is reached in {summary['roofline_cells_reached']} of {summary['roofline_cells']} "
        f"cells with the peak of an instant ({results['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s), and in "
        f"{summary['sustained_roofline_cells_reached']} with what cuBLAS sustains at 8192^3 without any pause "
        f"({_sustained(results['sustained'])}), which is no bound: cells have pauses. Fastest of all: "
        f"{_counted(fastest)}. In {_host_bound(cells)} of {summary['cells_timed']} cells the host takes longer to "
        "issue the fastest of ours than the device to run it. ",
        f"Wrong results: {', '.join(wrong) if wrong else 'none'}.",
        left_out(summary["cells"] - summary["cells_timed"], "cells"),
        f" {measured_on(results)}\n",
    ]
    return "".join(say)


def _host_bound(cells: list[dict[str, Any]]) -> int:
    """Cells in which the fastest of ours is slower to issue than to run."""
    best = [
        min(ours, key=lambda run: float(run["seconds"]))
        for cell in cells
        if (ours := [run for run in cell["runs"] if run["name"] in OURS and run["outcome"] == "ok"])
    ]
    return sum(run["host_seconds"] > run["seconds"] for run in best)


def _sustained(found: dict[str, Any]) -> str:
    """Rate, clock and power of a card that never rests."""
    parts = [f"{found['flops_per_second'] / 1e12:.0f} TFLOP/s"]
    if found["clock_mhz"] is not None:
        parts.append(f"{found['clock_mhz']:.0f} MHz")
    if found["power_watts"] is not None and found["power_limit_watts"] is not None:
        parts.append(f"{found['power_watts']:.0f} of {found['power_limit_watts']:.0f} W")
    return ", ".join(parts)


def variable_gemm(results: dict[str, Any], name: str) -> str:
    """Rates on the whole card, outcomes within the limit, and the uneven distribution against the even one."""
    names = [*results["contenders"]["baselines"], *results["contenders"]["ours"]]
    dtypes = list(dict.fromkeys(run["dtype"] for run in results["runs"]))
    found: dict[tuple[str, str, bool, str], list[dict[str, Any]]] = {}
    for run in results["runs"]:
        key = (run["case"], run["dtype"], run["limit_bytes"] is not None, run["contender"])
        found.setdefault(key, []).append(run)
    cases = list(results["cases"])

    def rows(limited: bool, show: Any) -> list[list[str]]:
        shown = []
        for case in cases:
            cells = [[show(found.get((case, dtype, limited, name), [])) for dtype in dtypes] for name in names]
            if any(text != "-" for texts in cells for text in texts):
                shown.append([case, *(" / ".join(texts) for texts in cells)])
        return shown

    limit = results["limit_bytes"] >> 30
    head = ["case", *names]
    limited = rows(True, _outcome)
    say = [
        "Variable-sized grouped GEMMs, (sequences, tokens each, hidden size, experts, top_k), hidden size to four "
        "times that: TFLOP/s of forward and backward in "
        f"{' / '.join(dtypes)} (float32 without TF32) on the whole card "
        f"(`python -m benchmarks.variable_gemm --out benchmarks/results/{name}.json`):\n\n",
        table(head, rows(False, _rate)),
    ]
    if limited:
        say += [
            f"\nWithin {limit} GiB (`forward`: only that fits, `too large`: the operands alone exceed it):\n\n",
            table(head, limited),
        ]
    sentences = []
    for of, what in (("forward", "Forward"), ("training", "Forward and backward")):
        part = results["summary"][of]
        counts = ", ".join(f"{n} {_passed(part['outcomes'][n])}" for n in names)
        sentences.append(
            f"{what}: one of ours passes in {part['cells_passed_by_ours']} of {part['cells']} cells (a case in one "
            f"number format on one card); by back end: {counts}."
        )
    for of, what in (("forward", "forward"), ("training", "forward and backward")):
        exhausted = Counter(row["contender"] for row in results["summary"][of]["out_of_memory"])
        sentences.append(f"Out of memory, {what}: {_counted(exhausted) if exhausted else 'none'}.")
    sentences.append(measured_on(results) + left_out(len(results["left_out"]), "runs"))
    say.append(f"\n{' '.join(sentences)}\n")
    uneven = results["summary"]["uneven_over_even"]
    if uneven:
        say += ["\nThe uneven distribution's time over the even one's, for as many rows:\n\n", _uneven(uneven)]
    return "".join(say)


def _passed(outcomes: dict[str, int]) -> str:
    """Of the cells that a contender had time for."""
    run = sum(outcomes.values()) - outcomes.get("left_out", 0)
    return f"{outcomes.get('ok', 0)}" + (f" of {run}" if outcomes.get("left_out") else "")


def _uneven(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys((row["dtype"], row["of"]) for row in rows))
    cells = {(row["contender"], row["dtype"], row["of"]): f"{row['ratio']:.2f} {row['verdict']}" for row in rows}
    named = {"training": "forward and backward"}
    return table(
        ["back end", *(f"{dtype}, {named.get(of, of)}" for dtype, of in columns)],
        [
            [contender, *(cells.get((contender, *column), "-") for column in columns)]
            for contender in dict.fromkeys(row["contender"] for row in rows)
        ],
    )


def _rate(runs: list[dict[str, Any]]) -> str:
    rates = [run["training"]["flops_per_second"] for run in runs if "flops_per_second" in run["training"]]
    return f"{statistics.mean(rates) / 1e12:.0f}" if rates else _outcome(runs)


def _outcome(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "-"
    training, forward = runs[0]["training"]["outcome"], runs[0]["forward"]["outcome"]
    if training != "ok" and forward == "ok":
        return "forward"
    if forward == "out_of_memory":
        return "out of memory"
    short = {"operands_exceed_limit": "too large", "out_of_memory": "out of memory", "timed_out": "timed out"}
    return str(short.get(training, training))


def _ratio(cell: dict[str, Any]) -> str:
    if "ratio" not in cell:
        return "-"
    shown = cell["roofline_seconds"] > ROOFLINE_SHOWN_SECONDS
    return f"{cell['ratio']:.2f}" + (f" ({cell['roofline_share']:.0%})" if shown else "")


def _fastest(runs: list[dict[str, Any]]) -> str:
    seconds = {run["name"]: run["seconds"] for run in runs if run["outcome"] == "ok"}
    return min(seconds, key=lambda name: seconds[name]) if seconds else "none"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
