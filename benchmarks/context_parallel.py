"""Attention over several devices, forward and backward, by layout, compared with the ideal and with other code.

    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --out benchmarks/results/NAME.json

The tokens of one sequence are spread over all devices, causal, in bfloat16. Times come from device events and are those
of the slowest rank: the median of rounds in which all contenders take turns. The ideal is the sum of the rates that the
devices reach with the same kernel if each works alone on the whole sequence, without communication. Every contender is
first compared with float64 at a short length.

torch's contender is `torch.distributed.tensor.experimental.context_parallel`, whose head-tail balance is the zigzag
layout, with both of its ways to pass keys and values on. If a contender does not run, the reason stands in its place.
Then all ranks fail alike, or the run ends with the group's timeout.

The summary has margins over the ring and over other implementations. Every contender is compared with the back end that
is fastest for it. Rounds of one contender differ; the spread is the distance between its fastest and its slowest round.
A margin that is no larger than the larger spread of the two reads `level`.

If the file exists, the run continues it: a length and back end that it has are not timed again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.context_parallel_contenders import Pass, Problem, alone, draw, ours, torchs
from benchmarks.continuation import begin
from benchmarks.environment import describe_environment, write_results
from benchmarks.gemm_summary import verdict
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.blocks import block_attention
from bexp.kernels.context_parallel.layouts import LAYOUTS
from bexp.kernels.context_parallel.ring import ring_group

SEQ_LENGTHS = {"cuda": (16384, 32768, 65536, 131072, 262144), "cpu": (256, 512)}
CHECKED_LENGTH = {"cuda": 2048, "cpu": 128}
BACKENDS = {"cuda": ("flash", "cudnn"), "cpu": ("flash",)}
HEADS = {"cuda": (32, 8, 64), "cpu": (4, 2, 16)}
"""Query heads, key heads and head size; on CUDA they are those of Llama-3.2-1B."""
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
TIMEOUT = timedelta(minutes=3)
"""Timeout of one operation: ranks that lost each other end after it."""
ROUND_SECONDS, MAX_CALLS = 0.03, 20
"""A turn takes this long or this many calls, whichever is less, but at least one call."""
IDENTITY = ("device", "num_devices", "versions", "heads", "dtype", "checked_length")
"""The settings that a run must share with one that continues it."""
ALONE, TORCH, EXPANDED = "alone", "torch", " expanded"
Row = dict[str, Any]


class Bench:
    """The state that all ranks share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        group = ring_group()
        self.contexts = {layout: ContextParallel(group, layout) for layout in LAYOUTS}
        self.size = self.contexts["ring"].size

    def contenders(self, problem: Problem, backend: str) -> dict[str, Callable[[], Any]]:
        """Functions that open the contenders, by name."""
        openers: dict[str, Callable[[], Any]] = {ALONE: partial(alone, problem, backend)}
        for layout, context in self.contexts.items():
            openers[layout] = partial(ours, problem, context, backend)
        for method in ("alltoall", "allgather"):
            torchs_own = partial(torchs, problem, self.contexts["zigzag"], backend, method)
            openers[f"{TORCH} {method}"] = partial(torchs_own, False)
            if problem.q.shape[1] != problem.k.shape[1]:
                openers[f"{TORCH} {method}{EXPANDED}"] = partial(torchs_own, True)
        return openers

    def check(self, problem: Problem, backend: str) -> dict[str, dict[str, Any]]:
        """Return relative errors of output and gradients against float64 by contender, or why it does not run.

        torch's own repeats keys and values only if it does not support groups.
        """
        block, scale = block_attention("math"), problem.q.shape[-1] ** -0.5
        whole = [x.double() for x in (problem.q, problem.k, problem.v)]
        out, lse = block.forward(whole[0], whole[1], whole[2], True, scale)
        grads = block.backward(problem.gradient.double(), whole[0], whole[1], whole[2], out, lse, True, scale)
        outcomes: dict[str, dict[str, Any]] = {}
        for name, open_contender in self.contenders(problem, backend).items():
            if name.endswith(EXPANDED) and "errors" in outcomes[name.removesuffix(EXPANDED)]:
                continue
            try:
                with open_contender() as run:
                    results = [x.detach() for x in run()]
            except Exception as error:  # noqa: BLE001 - whatever a contender raises is its outcome
                outcomes[name] = {"reason": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
                continue
            if name != ALONE:
                context = self.contexts[name if name in LAYOUTS else "zigzag"]
                results = [context.gather(x, dim=2) for x in results]
            errors = {
                what: float((actual.double() - expected).norm() / expected.norm())
                for what, actual, expected in zip(("out", "dq", "dk", "dv"), results, (out, *grads), strict=True)
            }
            right = max(errors.values()) <= TOLERANCES[problem.q.dtype]
            outcomes[name] = {"errors": errors} | ({} if right else {"reason": "its numbers are wrong"})
        return outcomes

    def time(self, problem: Problem, backend: str, names: list[str], rounds: int) -> dict[str, dict[str, Any]]:
        """Return seconds of a call by contender: median of the rounds, on the slowest rank (alone: on every device)."""
        contenders = self.contenders(problem, backend)
        samples: dict[str, list[list[float]]] = {name: [] for name in names}
        calls: dict[str, int] = {}
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                with contenders[name]() as run:
                    if name not in calls:
                        self._seconds(run, 1)
                        slowest = max(self._seconds(run, 1))
                        calls[name] = max(1, min(MAX_CALLS, int(ROUND_SECONDS / slowest)))
                    else:
                        run()
                    samples[name].append(self._seconds(run, calls[name]))
        timings = {}
        for name, of_rounds in samples.items():
            slowest_ranks = [max(of_ranks) for of_ranks in of_rounds]
            timings[name] = {
                "seconds": statistics.median(slowest_ranks),
                "spread_seconds": max(slowest_ranks) - min(slowest_ranks),
                "calls": calls[name] * rounds,
                "seconds_by_rank": [statistics.median(of_rank) for of_rank in zip(*of_rounds, strict=True)],
            }
        return timings

    def _seconds(self, run: Pass, calls: int) -> list[float]:
        """Return the seconds of one call on every rank."""
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            started = time.perf_counter()
            for _ in range(calls):
                run()
            seconds = time.perf_counter() - started
        gathered = [torch.zeros(1, dtype=torch.float64, device=self.device) for _ in range(self.size)]
        dist.all_gather(gathered, torch.tensor([seconds / calls], dtype=torch.float64, device=self.device))
        return [float(x) for x in gathered]


def compare(timed: dict[str, dict[str, Any]], problem: Problem, num_ranks: int) -> dict[str, Any]:
    """Compute rates, shares of the ideal, and speed relative to the ring; left out if one of the two did not run."""
    ideal = 1 / sum(1 / seconds for seconds in timed[ALONE]["seconds_by_rank"]) if ALONE in timed else None
    for name, run in timed.items():
        run["flops_per_second_and_device"] = problem.flops / run["seconds"] / (1 if name == ALONE else num_ranks)
        if name != ALONE:
            run["share_of_ideal"] = ideal / run["seconds"] if ideal else None
            run["speed_over_ring"] = timed["ring"]["seconds"] / run["seconds"] if "ring" in timed else None
    return {"ideal_seconds": ideal}


def summarize(cells: list[Row]) -> Row:
    """Return, by length, striped over ring, and our fastest layout over the fastest other implementation."""
    lengths = sorted({cell["seq_length"] for cell in cells})
    peers = {name for cell in cells for name in cell["timed"]} - {*LAYOUTS, ALONE}
    return {
        "striped_over_ring": [*_margins(cells, lengths, ("striped",), ("ring",))],
        "ours_over_peers": [*_margins(cells, lengths, LAYOUTS, peers)],
    }


def fastest(cells: Iterable[Row], length: int, names: Iterable[str]) -> Row | None:
    """Return the fastest run of these contenders at a length, on any back end; None if there is none."""
    wanted = frozenset(names)
    timed = [
        run | {"name": name, "backend": cell["backend"], "rounds": cell.get("rounds")}
        for cell in cells
        if cell["seq_length"] == length
        for name, run in cell["timed"].items()
        if name in wanted
    ]
    return min(timed, key=lambda run: float(run["seconds"]), default=None)


def _margins(cells: list[Row], lengths: list[int], ours: Iterable[str], others: Iterable[str]) -> Iterator[Row]:
    for length in lengths:
        own, other = fastest(cells, length, ours), fastest(cells, length, others)
        if own is None or other is None:
            continue
        ratio = other["seconds"] / own["seconds"]
        spread = max(own["spread_seconds"], other["spread_seconds"]) / own["seconds"]
        yield {
            "seq_length": length,
            "ours": own["name"],
            "other": other["name"],
            "ratio": ratio,
            "spread": spread,
            "rounds": min(own["rounds"], other["rounds"]) if own["rounds"] and other["rounds"] else None,
            "verdict": verdict(ratio, spread),
        }


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print and write one JSON file (rank 0); 1 if one of our layouts is wrong or does not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq-lengths", type=int, nargs="+")
    parser.add_argument("--backends", nargs="+")
    parser.add_argument("--heads", type=int, nargs=3, metavar=("HEADS", "GROUPS", "HEAD_SIZE"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16, on a CPU float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    kind, heads = options.device, tuple(options.heads or HEADS[options.device])
    dtype = getattr(torch, options.dtype or DTYPES[kind])
    device = torch.device(kind, dist.get_node_local_rank() if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=TIMEOUT)
    bench = Bench(device)
    fresh: dict[str, Any] = {
        "environment": describe_environment(),
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else "cpu",
        "num_devices": bench.size,
        "versions": {
            "cudnn": torch.backends.cudnn.version(),
            "nccl": list(torch.cuda.nccl.version()) if kind == "cuda" else None,
        },
        "heads": dict(zip(("num_heads", "query_groups", "head_size"), heads, strict=True)),
        "dtype": str(dtype).removeprefix("torch."),
        "checked_length": CHECKED_LENGTH[kind],
        "checks": {},
        "cells": [],
    }
    try:
        results = begin(options.out, fresh, same=IDENTITY)
    except ValueError as error:
        parser.error(str(error))
    dist.barrier()  # every rank has read the file before the first writes it
    is_wrong = False
    for backend in options.backends or BACKENDS[kind]:
        checks = bench.check(draw(CHECKED_LENGTH[kind], heads, dtype, device), backend)
        results["checks"][backend] = checks
        is_wrong |= any("reason" in checks[layout] for layout in LAYOUTS)
        names = [name for name, check in checks.items() if "reason" not in check]
        known = {cell["seq_length"] for cell in results["cells"] if cell["backend"] == backend}
        for seq_length in sorted(set(options.seq_lengths or SEQ_LENGTHS[kind]) - known):
            problem = draw(seq_length, heads, dtype, device)
            timed = bench.time(problem, backend, names, options.rounds)
            cell = {"seq_length": seq_length, "backend": backend, "rounds": options.rounds, "flops": problem.flops}
            cell |= {"timed": timed, **compare(timed, problem, bench.size)}
            results["cells"] = sorted((*results["cells"], cell), key=lambda cell: (cell["backend"], cell["seq_length"]))
            if dist.get_rank() == 0:
                write_results(options.out, results | {"summary": summarize(results["cells"])})
                print_cell(cell)
    dist.barrier()
    dist.destroy_process_group()
    return int(is_wrong)


def print_cell(cell: dict[str, Any]) -> None:
    """Print milliseconds, share of the ideal and speed over the ring by contender."""
    print(f"S={cell['seq_length']} {cell['backend']}, forward and backward")
    for name, run in cell["timed"].items():
        shares = "".join(
            f"  {what} {run[key]:.3f}"
            for what, key in (("of ideal", "share_of_ideal"), ("over ring", "speed_over_ring"))
            if run.get(key) is not None
        )
        print(
            f"  {name:<26}{1e3 * run['seconds']:10.3f} ms {run['flops_per_second_and_device'] / 1e12:7.1f} "
            f"TFLOP/s a device{shares}",
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
