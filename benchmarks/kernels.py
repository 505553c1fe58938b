"""Grouped GEMM alone, forward and backward: our back ends against the loop, bmm and torch's grouped_mm.

    python -m benchmarks.kernels --out results/NAME.json [--quick] [--variants]

(K, N) = (2048, 1024) in bfloat16, over numbers of experts, tokens per expert, and even and Zipf(1) loads. Times are
medians of the profiler's own timer: device events, the second-level cache overwritten before each pass, the device
under load before and between the repeats, and launches queued ahead if the host is slower than the device. Forward and
backward are timed separately and added. Every contender's results are compared with float64 in the same run.

The roofline of a product is max(FLOPs / matmul peak, bytes / bandwidth) with every operand moved once, summed over
forward, dX and dW. Peak and bandwidth are measured before and after in the same run, and the higher of each counts.
This peak lasts only until the power limit acts. A second roofline uses the rate that the card sustains, as the cells
do.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe_environment, write_results
from benchmarks.gemm_contenders import BASELINES, OURS, GemmPasses, Problem, errors, problem
from benchmarks.gemm_summary import summarize
from benchmarks.gemm_variants import compare_tiles, compile_tiles
from benchmarks.sustained import sustained_matmul
from bexp.measure.cuda_timing import CudaTimer
from bexp.measure.timing import TimingBudget
from explorer.spec.hardware import HardwareSpec
from explorer.spec.model import DType
from workers.profiler.failures import classify, is_poisoned
from workers.profiler.hardware import measure_hardware

K, N = 2048, 1024
EXPERTS = (8, 64, 128)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_EXPERTS, QUICK_TOKENS = (8, 128), (16, 128, 512, 2048)
DISTRIBUTIONS = ("uniform", "zipf")
VARIANTS_LOADS = (
    (128, 2048, "uniform"),
    (128, 2048, "zipf"),
    (128, 16, "uniform"),
    (128, 128, "zipf"),
    (8, 512, "uniform"),
    (64, 256, "uniform"),
    (128, 64, "uniform"),
    (8, 8192, "zipf"),
)
TOLERANCE = 1e-2
FULL_SECONDS, QUICK_SECONDS, VARIANTS_SECONDS = 330.0, 80.0, 240.0
"""No case starts after these seconds. The results name what was left out."""
SLOWEST_PASS_SECONDS = 1.0
"""A contender whose warm-up takes longer is not timed."""


class KernelTimer(CudaTimer):
    """Fewer repeats a case than an exploration makes: there are hundreds."""

    BUDGET = TimingBudget(min_repeats=5, max_repeats=30, seconds=0.2)
    MAX_WARM_UP_SECONDS = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and write one JSON file; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="fewer cases, within 90 s")
    parser.add_argument("--variants", action="store_true", help="compare the tiles of the kernels instead")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("these kernels are timed on a CUDA device, and there is none")
    device = torch.device("cuda", torch.cuda.current_device())
    hardware = measure_hardware(device, None)
    timer = KernelTimer(device)
    found: dict[str, Any] = {
        "environment": describe_environment(),
        "hardware": hardware.model_dump(mode="json"),
        "k": K,
        "n": N,
    }
    if options.variants:
        found["variants"] = time_variants(device, timer, time.monotonic() + VARIANTS_SECONDS)
        write_results(options.out, found)
        print_variants(found["variants"])
        return 0
    seconds = QUICK_SECONDS if options.quick else FULL_SECONDS
    cells = time_cells(device, timer, time.monotonic() + seconds, quick=options.quick)
    after = measure_hardware(device, None)
    peak, bandwidth = peaks(hardware, after)
    sustained = sustained_matmul(device)
    for cell in cells:
        cell["roofline_seconds"] = roofline_seconds(cell["counts"], peak, bandwidth)
        cell["sustained_roofline_seconds"] = roofline_seconds(cell["counts"], sustained["flops_per_second"], bandwidth)
    found |= {"matmul_flops_per_second": peak, "bandwidth_bytes_per_second": bandwidth, "sustained": sustained}
    found["cells"] = cells
    found["summary"] = summarize(cells)
    write_results(options.out, found)
    print_table(found)
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


def time_cells(device: torch.device, timer: KernelTimer, deadline: float, *, quick: bool) -> list[dict[str, Any]]:
    """Every contender in every cell; a cell that does not start in time has no runs."""
    cells = []
    for num_experts in QUICK_EXPERTS if quick else EXPERTS:
        for tokens in QUICK_TOKENS if quick else TOKENS:
            for distribution in DISTRIBUTIONS:
                counts = loads(distribution, num_experts, tokens)
                cell = {"experts": num_experts, "tokens": tokens, "distribution": distribution, "counts": counts}
                runs: list[dict[str, Any]] = []
                if time.monotonic() < deadline:
                    given = problem(counts, K, N, torch.bfloat16, device)
                    runs = [time_contender(name, given, timer) for name in (*BASELINES, *OURS)]
                    del given
                cells.append(cell | {"runs": runs})
    return cells


def time_contender(name: str, given: Problem, timer: KernelTimer) -> dict[str, Any]:
    """Check and time one contender; failing is an outcome."""
    run: dict[str, Any] = {"name": name}
    try:
        passes = GemmPasses((BASELINES | OURS)[name](given))
        with poisoned():
            run["errors"] = errors(passes, given)
        if not all(error <= TOLERANCE for error in run["errors"].values()):  # NaN is wrong, too
            return run | {"outcome": "wrong"}
        started = time.perf_counter()
        timer.warm_up(passes)
        if time.perf_counter() - started > SLOWEST_PASS_SECONDS:
            return run | {"outcome": "too_slow"}
        timing = timer.time(passes)
    except Exception as error:  # any exception of a back end is its outcome, unless the device is unusable afterwards
        if is_poisoned(given.x.device):
            raise
        outcome, reason = classify(error)
        return run | {"outcome": outcome.value, "reason": reason}
    finally:
        if name in ("bmm", "block_sparse"):  # their operands are large and their own
            passes = None  # type: ignore[assignment]  # lets go of it
            torch.cuda.empty_cache()
    return run | {
        "outcome": "ok",
        "seconds": timing.device_seconds,
        "forward_seconds": timing.forward_device_seconds,
        "host_seconds": timing.host_seconds,
        "standard_error_seconds": timing.standard_error_seconds,
        "repeats": timing.repeats,
        "flops_per_second": 6 * sum(given.counts) * K * N / timing.device_seconds,
    }


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


def time_variants(device: torch.device, timer: KernelTimer, deadline: float) -> list[dict[str, Any]]:
    """Every choice of tiles for a few loads."""
    rows = []
    compile_tiles({num_experts for num_experts, _, _ in VARIANTS_LOADS}, K, N)
    for num_experts, tokens, distribution in VARIANTS_LOADS:
        given = problem(loads(distribution, num_experts, tokens), K, N, torch.bfloat16, device)
        key = {"experts": num_experts, "tokens": tokens, "distribution": distribution}
        rows += [key | row for row in compare_tiles(given, timer, deadline)]
    return rows


def print_table(found: dict[str, Any]) -> None:
    """TFLOP/s of each contender, ours over theirs, and the share of the roofline."""
    peak, bandwidth = found["matmul_flops_per_second"], found["bandwidth_bytes_per_second"]
    sustained = found["sustained"]
    print(
        f"peak {peak / 1e12:.0f} TFLOP/s, sustained {sustained['flops_per_second'] / 1e12:.0f} at "
        f"{sustained['clock_mhz']} MHz and {sustained['power_watts']} W; {bandwidth / 1e12:.2f} TB/s; TFLOP/s forward "
        "and backward"
    )
    names = (*BASELINES, *OURS)
    print(f"{'E':>4} {'tokens':>6} {'load':>8} " + " ".join(f"{name[:14]:>14}" for name in names) + "  ratio  roofline")
    for cell in found["cells"]:
        runs = {run["name"]: run for run in cell["runs"]}
        shown = [_shown(runs[name]) if name in runs else "-" for name in names]
        ratio, share = cell.get("ratio"), cell.get("roofline_share")
        print(
            f"{cell['experts']:>4} {cell['tokens']:>6} {cell['distribution']:>8} "
            + " ".join(f"{text:>14}" for text in shown)
            + (f"  {ratio:5.2f}" if ratio else "      -")
            + (f"  {share:5.0%} of {cell['roofline_seconds'] * 1e6:.0f} us" if share else "")
        )
    print(found["summary"])
    failures = {(r["name"], r["reason"]) for cell in found["cells"] for r in cell["runs"] if "reason" in r}
    for name, reason in sorted(failures):
        print(f"{name}: {reason}")


def print_variants(rows: list[dict[str, Any]]) -> None:
    """TFLOP/s by product and load, the best first."""
    keys = list(dict.fromkeys((r["experts"], r["tokens"], r["distribution"], r["product"]) for r in rows))
    for key in keys:
        experts, tokens, distribution, product = key
        mine = [r for r in rows if (r["experts"], r["tokens"], r["distribution"], r["product"]) == key]
        flops = 2 * experts * tokens * K * N
        timed = sorted((r for r in mine if "seconds" in r), key=lambda r: float(r["seconds"]))
        print(f"E={experts} tokens={tokens} {distribution} {product}")
        for row in timed:
            print(f"    {row['seconds'] * 1e6:9.1f} us {flops / row['seconds'] / 1e12:6.0f} TFLOP/s  {row['tiles']}")
        for row in mine:
            if "reason" in row:
                print(f"    {row['tiles']}: {row['reason'][:150]}")


def _shown(run: dict[str, Any]) -> str:
    return f"{run['flops_per_second'] / 1e12:.0f}" if run["outcome"] == "ok" else str(run["outcome"])[:14]


if __name__ == "__main__":
    sys.exit(main())
