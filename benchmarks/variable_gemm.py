"""Variable-sized expert GEMMs: the cases of a report on them, every expert back end, even and uneven loads.

    python -m benchmarks.variable_gemm --out results/NAME.json [--max-seconds S] [--device cpu --tiny]

A case is (num_sequences, sequence_length, hidden_size, num_experts, top_k): a whole expert FFN of two matrices, four
times as wide inside, with a GELU, forward and backward. Its loads are the even one and a random uneven one, of those
that `top_k` distinct experts allow. The report's own uneven rows are not among these, so they are timed as plain GEMMs
of 512 to 2048 columns with both gradients, next to as many rows evenly. The formats are bfloat16, float16, and float32
without TF32.

Each result is compared with float64 (relative error in norm); new memory holds NaN beforehand. Times are those of a
loop of forwards and backwards by the clock, and of the device alone, in turns with all contenders and both loads of a
case. The peak counts operands, results and gradients, but nothing that only the benchmark holds; the report's card had
16 GiB. The cases run in a process of their own. If a contender takes it down, its outcome is that, and the others
of the case run again without it. If the file exists, the run continues it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_builds
from benchmarks.environment import begin, describe_commit, describe_environment, kernels_digest, write_results
from benchmarks.expert_problems import Experts, Gemms
from benchmarks.expert_runs import TOLERANCES, Problem, measure, missing
from benchmarks.variable_cases import CASES, CRASHED, EVEN, LARGEST, PAIR, UNEVEN, Case, routes_of
from bexp.explorer.records.measurement import Outcome
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.shapes import ExpertsShape
from bexp.targets.registry import version_of


@dataclass(frozen=True)
class Cell:
    """A case in a number format: whole expert FFNs, or the report's own rows as plain GEMMs (`is_reported`)."""

    case: Case
    dtype: torch.dtype
    is_reported: bool = False
    poisons: bool = True

    @property
    def key(self) -> dict[str, Any]:
        """What its rows have in common."""
        kind = "gemm" if self.is_reported else "ffn"
        return {"kind": kind, "case": self.case.name, "dtype": dtype_name(self.dtype)}

    @property
    def shape(self) -> ExpertsShape:
        """The experts."""
        case = self.case
        return ExpertsShape(
            case.hidden, case.width, case.num_experts, case.top_k, self.dtype, gated=False, activation="gelu"
        )

    def problems(self, device: torch.device) -> Iterator[tuple[dict[str, Any], Problem]]:
        """Yield one for each load. Rows have the experts' tokens where there are few experts."""
        case = self.case
        loads = case.reported if self.is_reported else {load: case.counts(load) for load in case.loads}
        for load, counts in loads.items():
            told_by = {"load": load, "counts": counts if len(counts) <= FEW else None}
            if self.is_reported:
                yield told_by, Gemms(case, self.dtype, counts, device)
            else:
                yield told_by, Experts(self.shape, routes_of(counts, case.num_tokens).to(device))


FEW = 8
MAX_SECONDS = 240.0
LIMIT_BYTES = 16 << 30
"""The memory of the report's card."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CELLS = (
    *(Cell(PAIR, dtype, is_reported=True) for dtype in (BF16, FP16, FP32)),
    *(Cell(CRASHED, dtype) for dtype in (BF16, FP16, FP32)),
    *(Cell(case, BF16) for case in (PAIR, LARGEST)),
    *(Cell(case, BF16) for case in CASES if case not in {CRASHED, PAIR, LARGEST}),
    *(Cell(case, FP32) for case in CASES if case not in {CRASHED, LARGEST}),
    *(Cell(case, FP16) for case in CASES if case not in {CRASHED, LARGEST}),
    *(Cell(LARGEST, dtype) for dtype in (FP16, FP32)),
)
"""The most telling first: there may not be time for all."""
TINY = 4096
PACKAGES = ("nvidia-cublas", "liger-kernel", "sonic-moe", "quack-kernels", "deep-gemm")


def main(arguments: list[str] | None = None) -> int:
    """Run what there is time for and write one JSON file; 1 if a result was wrong or a process was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-seconds", type=float, default=MAX_SECONDS, help="start no case after so long")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a few tokens, small widths and two cases, for tests")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.max_seconds
    fresh: dict[str, Any] = {
        "environment": describe_environment() | {"compared": versions()},
        "commit": describe_commit(),
        "hardware": describe_device(options.device),
        "kernels": kernels_digest(),
        "limit_bytes": LIMIT_BYTES,
        "tolerances": {dtype_name(dtype): tolerance for dtype, tolerance in TOLERANCES.items()},
        "rows": [],
        "left_out": [],
    }
    try:
        results = begin(options.out, fresh, same=("kernels", "tolerances"))
    except ValueError as error:
        parser.error(str(error))
    cells = missing(tiny_cells() if options.tiny else CELLS, results["rows"])
    results["left_out"] = [cell.key for cell in cells]
    needed = ((cell.shape, cell.case.num_tokens, False) for cell in cells if cell.dtype != FP32)
    kernel_builds.build(needed, options.device)
    for rows in measure(cells, options.device, deadline):
        results["rows"] += rows
        results["left_out"].pop(0)
        results["summary"] = summarize(results["rows"])
        write_results(options.out, results)
        for row in rows:
            print(describe(row), flush=True)
    write_results(options.out, results | {"summary": summarize(results["rows"])})
    for line in describe_summary(summarize(results["rows"])):
        print(line)
    bad = {"wrong", Outcome.CRASHED.value, Outcome.TIMED_OUT.value}
    return int(any(row["outcome"] in bad for row in results["rows"]))


def tiny_cells() -> list[Cell]:
    """Two cases and the report's rows, for a CPU."""
    cells = [Cell(PAIR, BF16, is_reported=True), Cell(CRASHED, FP32), Cell(PAIR, BF16)]
    return [Cell(cell.case.shrunk(TINY), cell.dtype, cell.is_reported) for cell in cells]


def describe_device(name: str) -> dict[str, Any]:
    """Return the kind and the name of a device, found in this process, which opens no other."""
    device = torch.device(name)
    is_cuda = device.type == "cuda"
    return {
        "device_kind": device.type,
        "device_name": torch.cuda.get_device_name(device) if is_cuda else "CPU",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What became of each contender, and the report's two findings: uneven over even, and processes that ended."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    contenders = {}
    for name in names:
        mine = [row for row in rows if row["contender"] == name]
        outcomes = Counter(row["outcome"] for row in mine)
        right = [row for row in mine if row["outcome"] == Outcome.OK]
        within = [row for row in right if row["peak_bytes"] is not None and row["peak_bytes"] <= LIMIT_BYTES]
        contenders[name] = {
            "cells": len(mine),
            "outcomes": dict(outcomes),
            "within_limit": len(within),
            "fastest": sum(_is_fastest(row, rows) for row in mine),
            "fastest_on_device": sum(_is_fastest(row, rows, "device_seconds") for row in mine),
            "largest_error": {
                dtype: max(row["largest_error"] for row in right if row["dtype"] == dtype)
                for dtype in dict.fromkeys(row["dtype"] for row in right)
            },
        }
    ended = (Outcome.CRASHED.value, Outcome.TIMED_OUT.value)
    return {
        "contenders": contenders,
        "uneven_over_even": list(_uneven_over_even(rows)),
        "ended": [row for row in rows if row["outcome"] in ended],
        "out_of_memory": [row for row in rows if row["outcome"] == Outcome.OUT_OF_MEMORY],
    }


def _key(row: dict[str, Any], *, load: bool = True) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("kind", "case", "dtype", *(("load",) if load else ())))


def _is_fastest(row: dict[str, Any], rows: list[dict[str, Any]], seconds: str = "seconds") -> bool:
    rivals = [other[seconds] for other in rows if _key(other) == _key(row) and seconds in other]
    return seconds in row and row[seconds] <= min(rivals)


def _uneven_over_even(rows: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield the device's time of the uneven load over that of as many rows evenly, of each case with both."""
    for row in rows:
        if row.get("load") != UNEVEN or "seconds" not in row:
            continue
        even = next(
            (
                other
                for other in rows
                if _key(other, load=False) == _key(row, load=False)
                and (other.get("load"), other["contender"]) == (EVEN, row["contender"])
                and "seconds" in other
            ),
            None,
        )
        if even is None:
            continue
        ratio = row["device_seconds"] / even["device_seconds"]
        errors = (one.get("device_error_seconds", 0.0) / one["device_seconds"] for one in (row, even))
        error = ratio * sum(each**2 for each in errors) ** 0.5
        verdict = "faster" if ratio + 2 * error < 1 else "slower" if ratio - 2 * error > 1 else "level"
        yield {
            **{name: row[name] for name in ("kind", "case", "dtype", "contender")},
            "ratio": ratio,
            "error": error,
            "by_clock": row["seconds"] / even["seconds"],
            "verdict": verdict,
        }


def describe(row: dict[str, Any]) -> str:
    """One line."""
    head = " ".join(str(row.get(name, "")) for name in ("kind", "case", "dtype", "load"))
    if "largest_error" not in row:
        return f"{head:52}{row['contender']:16}{row['outcome']}: {row.get('reason')}"
    peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.1f} GiB"
    error = "not a number" if row["largest_error"] is None else f"{row['largest_error']:.1e}"
    timed = (
        f"{row['seconds'] * 1e3:9.3f} ms by the clock, {row['device_seconds'] * 1e3:9.3f} on the device, "
        f"{row['flops_per_second'] / 1e12:6.1f} TFLOP/s"
        if "seconds" in row
        else row["outcome"]
    )
    return f"{head:52}{row['contender']:16}{timed}{peak}, error {error}"


def describe_summary(summary: dict[str, Any]) -> Iterable[str]:
    """Yield what is to be read first."""
    for name, each in summary["contenders"].items():
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in each["outcomes"].items())
        fastest = f"fastest in {each['fastest']} by the clock, in {each['fastest_on_device']} on the device"
        yield f"{name}: {outcomes}; {each['within_limit']} within 16 GiB; {fastest}"
    for row in summary["uneven_over_even"]:
        where = f"{row['kind']} {row['case']} {row['dtype']} {row['contender']}"
        yield f"uneven / even {where}: {row['ratio']:.3f} +- {row['error']:.3f} ({row['verdict']})"
    for row in (*summary["ended"], *summary["out_of_memory"]):
        yield f"{row['outcome']}: {row['contender']} {row['case']} {row['dtype']} {row.get('load', '')}"


def versions() -> dict[str, str]:
    return {name: installed for name in PACKAGES if (installed := version_of(name)) is not None}


if __name__ == "__main__":
    sys.exit(main())
