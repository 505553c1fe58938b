"""Grouped GEMM alone, forward and backward: our back ends against the loop, bmm and torch's grouped_mm.

    python -m benchmarks.kernels --out results/NAME.json [--minutes M] [--contenders NAME ...]

(K, N) = (2048, 1024) in bfloat16, over numbers of experts, tokens per expert, and even and Zipf(1) loads. A cell's
contenders run in turns. The clock's time is that of a loop of forwards and backwards, the host included, as a model has
them: eight products in one graph where memory allows it, each with operands of its own, so that no cache holds them.
The device's time is that of the same loop with its launches queued ahead. Both are medians over the turns. Every
contender's results are compared with float64 in the same run.

`auto` takes its kernels from a table that is measured before the cells, at the same shapes, under even and Zipf(1)
loads. It is not told which of the two a cell has. `auto_counted` is `auto` with the experts' counts on the host, which
is what the padding of `bmm` needs to know: where all are equal, `bmm` is one of its kernels.

If the file exists, the run continues it: cells that have runs are kept. A file of other sources of the kernels is
refused.

The roofline of a product is max(FLOPs / matmul peak, bytes / bandwidth) with every operand moved once, summed over
forward, dX and dW. Peak and bandwidth are measured before and after in the same run, and the higher of each counts.
This peak lasts only until the power limit acts. A second roofline uses the rate that the card sustains, as the cells
do.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.continuation import begin
from benchmarks.environment import describe_environment, write_results
from benchmarks.gemm_contenders import BASELINES, CHOSEN, COUNTED, OURS, GemmPasses, Problem, errors, problem
from benchmarks.gemm_summary import summarize
from benchmarks.sustained import sustained_matmul
from bexp.explorer.spec.hardware import HardwareSpec
from bexp.explorer.spec.model import DType
from bexp.kernels.experts.auto.digest import kernels_digest
from bexp.kernels.experts.auto.measuring import GemmShape
from bexp.kernels.experts.registry import AUTO_EXPERTS
from bexp.measure.turns import Run, TurnsBudget, TurnTiming, chained, synchronize, time_in_turns
from bexp.workers.instruments.failures import classify, is_poisoned
from bexp.workers.profiler.hardware import measure_hardware

K, N = 2048, 1024
EXPERTS = (8, 64, 128)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DISTRIBUTIONS = ("uniform", "zipf")
TOLERANCE = 1e-2
MINUTES = 9.0
"""No case starts after this time. Cells that were left out have no runs; starting again measures them."""
CONTENDERS = BASELINES | OURS | CHOSEN | COUNTED
REFERENCE = "grouped_mm"
HOPELESS = 4.0
"""A contender that is so many times slower than the fastest before it is run once, and not in turns."""
BUDGET = TurnsBudget(rounds=25, chain_seconds=3e-3, hopeless=math.inf, most_seconds=1.2)
SAVED_CELLS = 10
"""After so many cells the file is written, in case the command is stopped."""


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and write one JSON file; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="start no cell after so long")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="default: all")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("these kernels are timed on a CUDA device, and there is none")
    device = torch.device("cuda", torch.cuda.current_device())
    hardware = measure_hardware(device, None)
    results: dict[str, Any] = {
        "environment": describe_environment(),
        "hardware": hardware.model_dump(mode="json"),
        "kernels": kernels_digest(),
        "k": K,
        "n": N,
    }
    names = [name for name in CONTENDERS if name in (options.contenders or CONTENDERS)]
    deadline = time.monotonic() + 60 * options.minutes
    fresh = results | {"contenders": names, "cells": empty_cells(), "table_seconds": 0.0}
    try:
        results = begin(options.out, fresh, same=("k", "n", "contenders", "kernels"))
    except ValueError as error:
        parser.error(str(error))
    cells, kept = results["cells"], sum(bool(cell["runs"]) for cell in results["cells"])
    if kept:
        print(f"{options.out}: {kept} cells are kept and not measured again")
    todo = sorted((cell for cell in cells if not cell["runs"]), key=lambda cell: sum(cell["counts"]))
    for number, cell in enumerate(todo):
        if time.monotonic() > deadline:
            break
        for name in (CHOSEN | COUNTED).keys() & names:
            results["table_seconds"] += prepare_table(cell, device, counted=name in COUNTED)
        cell["runs"] = time_cell(tuple(cell["counts"]), names, device)
        if number % SAVED_CELLS == 0:
            write_results(options.out, results)
    peak, bandwidth = peaks(hardware, measure_hardware(device, None))
    sustained = sustained_matmul(device)
    for cell in cells:
        cell["roofline_seconds"] = roofline_seconds(cell["counts"], peak, bandwidth)
        cell["sustained_roofline_seconds"] = roofline_seconds(cell["counts"], sustained["flops_per_second"], bandwidth)
    results |= {"matmul_flops_per_second": peak, "bandwidth_bytes_per_second": bandwidth, "sustained": sustained}
    results["summary"] = summarize(cells)
    write_results(options.out, results)
    print_summary(results)
    print(f"{results['table_seconds']:.1f} s were spent on the table of auto")
    return 0 if all(run["outcome"] != "wrong" for cell in cells for run in cell["runs"]) else 1


def loads(distribution: str, num_experts: int, tokens: int) -> tuple[int, ...]:
    """Rows an expert that sum to num_experts * tokens; Zipf's experts in a random, fixed order."""
    if distribution == "uniform":
        return (tokens,) * num_experts
    total = num_experts * tokens
    share = 1 / torch.arange(1, num_experts + 1, dtype=torch.float64)
    bounds = (share.cumsum(0) / share.sum() * total).round().long()
    counts = torch.diff(bounds, prepend=torch.zeros(1, dtype=torch.int64))
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))
    return tuple(counts[order].tolist())


def empty_cells() -> list[dict[str, Any]]:
    """All cells, without runs."""
    return [
        {
            "experts": num_experts,
            "tokens": tokens,
            "distribution": distribution,
            "counts": loads(distribution, num_experts, tokens),
            "runs": [],
        }
        for num_experts in EXPERTS
        for tokens in TOKENS
        for distribution in DISTRIBUTIONS
    ]


def prepare_table(cell: dict[str, Any], device: torch.device, *, counted: bool) -> float:
    """Measure what `auto` needs to know for a cell, unless it is known, and return the seconds that this took."""
    started = time.perf_counter()
    even = counted and len(set(cell["counts"])) == 1
    shape = GemmShape(cell["experts"], K, N, torch.bfloat16, even=even)
    AUTO_EXPERTS.gemms.plan(shape, sum(cell["counts"]), device, may=True)
    return time.perf_counter() - started


def time_cell(counts: tuple[int, ...], names: Iterable[str], device: torch.device) -> list[dict[str, Any]]:
    """Check every contender, and time those in turns that are not hopelessly slow; failing is an outcome."""
    given = problem(counts, K, N, torch.bfloat16, device)
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    links: dict[str, int] = {}
    fastest = math.inf
    for name in sorted(names, key=lambda name: name != REFERENCE):  # what tells whether others are hopeless comes first
        rows[name], contender = _checked(name, given)
        if contender is not None:
            run, links[name] = contender
            once = seconds_once(run, device) / links[name]
            fastest = min(fastest, once)
            if once > HOPELESS * fastest:
                rows[name] |= _timed(TurnTiming(once, 0.0, once, 0.0, 1, in_turns=False), 1, sum(counts))
            else:
                runs[name] = run
        del contender
        torch.cuda.empty_cache()
    for name, timing in time_in_turns(runs, device, BUDGET).items():
        rows[name] |= _timed(timing, links[name], sum(counts))
    return [rows[name] for name in names]


def _checked(name: str, given: Problem) -> tuple[dict[str, Any], tuple[Run, int] | None]:
    """The errors of a contender, and what is timed, if they are small."""
    row: dict[str, Any] = {"name": name}
    try:
        operands = CONTENDERS[name](given)
        with poisoned():
            row["errors"] = errors(GemmPasses(operands), given)
        if not all(error <= TOLERANCE for error in row["errors"].values()):  # NaN is wrong, too
            return row | {"outcome": "wrong"}, None
        return row, chained(operands.multiply, (operands.x, operands.w), operands.grad)
    except Exception as error:  # any exception of a back end is its outcome, unless the device is unusable afterwards
        if is_poisoned(given.x.device):
            raise
        outcome, reason = classify(error)
        return row | {"outcome": outcome.value, "reason": reason}, None


def seconds_once(run: Run, device: torch.device) -> float:
    """Seconds of the fastest of three runs, by the clock."""
    seconds = []
    for _ in range(3):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _timed(timing: TurnTiming, links: int, num_rows: int) -> dict[str, Any]:
    seconds = {
        "seconds": timing.device_seconds,
        "standard_error_seconds": timing.device_error_seconds,
        "clock_seconds": timing.clock_seconds,
        "clock_error_seconds": timing.clock_error_seconds,
    }
    row = {name: value / links for name, value in seconds.items()}
    rate = 6 * num_rows * K * N / row["clock_seconds"]
    return row | {"outcome": "ok", "repeats": timing.rounds, "in_turns": timing.in_turns, "flops_per_second": rate}


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # not in torch's stubs
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def peaks(*measured: HardwareSpec) -> tuple[float, float]:
    """The highest bfloat16 matmul rate and bandwidth of several measurements."""
    return (
        max(spec.matmul_flops_per_second[DType.BFLOAT16] for spec in measured),
        max(spec.memory_bandwidth_bytes_per_second for spec in measured),
    )


def roofline_seconds(counts: tuple[int, ...], peak: float, bandwidth: float) -> float:
    """Return the bytes of forward, dX and dW. An expert without rows is not read, but its gradient is written."""
    rows, used = sum(counts), sum(count > 0 for count in counts)
    operands = rows * K + rows * N
    sizes = (operands + used * K * N, operands + used * K * N, operands + len(counts) * K * N)
    return sum(max(2 * rows * K * N / peak, 2 * size / bandwidth) for size in sizes)


def print_summary(results: dict[str, Any]) -> None:
    """The summary, and why contenders failed; `benchmarks.result_tables` shows the cells."""
    print(results["summary"])
    failures = {(r["name"], r["reason"]) for cell in results["cells"] for r in cell["runs"] if "reason" in r}
    for name, reason in sorted(failures):
        print(f"{name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
