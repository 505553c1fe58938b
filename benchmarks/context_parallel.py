"""Attention over several devices, forward and backward, by layout, compared with the ideal.

    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --out benchmarks/results/NAME.json

The tokens of one sequence are spread over all devices, causal, in bfloat16, with the heads of Llama-3.2-1B. Times come
from device events and are those of the slowest rank: the median of rounds in which all layouts take turns. The ideal is
the sum of the rates that the devices reach with the same kernel if each works alone on the whole sequence, without
communication. `tests/gpu/test_context_parallel.py` compares the layouts with float64.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.environment import describe_environment, write_results
from benchmarks.rank_runs import join_ranks
from bexp.kernels.attention import attention_backend
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.layouts import LAYOUTS
from bexp.kernels.context_parallel.ring import ring_group

SEQ_LENGTHS = (16384, 32768, 65536, 131072, 262144)
BACKENDS = ("flash", "cudnn")
NUM_HEADS, NUM_GROUPS, HEAD_SIZE = 32, 8, 64
ROUND_SECONDS, MAX_CALLS = 0.03, 20
"""A turn takes this long or this many calls, whichever is less, but at least one call."""
ALONE = "alone"

Pass = Callable[[], object]


def flops_of(seq_length: int) -> int:
    """FLOPs of causal attention, forward and backward: two and five products of half a square."""
    return 7 * seq_length**2 * NUM_HEADS * HEAD_SIZE


def differentiate(attend: Callable[[Tensor, Tensor, Tensor], Tensor], parts: list[Tensor]) -> Pass:
    """Return a call of forward and backward of `attend` on q, k and v; the last part is the output's gradient."""
    *inputs, gradient = parts
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), gradient)


class Bench:
    """The state that all ranks share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        group = ring_group()
        self.contexts = {layout: ContextParallel(group, layout) for layout in LAYOUTS}
        self.size = self.contexts["ring"].size

    def passes(self, seq_length: int, backend: str) -> dict[str, Pass]:
        """Return the contenders on the same numbers: each layout, and the kernel on the whole sequence."""
        generator = torch.Generator(self.device).manual_seed(seq_length)
        whole = [
            torch.randn(1, seq_length, n, HEAD_SIZE, dtype=torch.bfloat16, device=self.device, generator=generator)
            for n in (NUM_HEADS, NUM_GROUPS, NUM_GROUPS, NUM_HEADS)
        ]
        passes = {ALONE: differentiate(attention_backend(backend).run, [x.transpose(1, 2) for x in whole])}
        for layout, context in self.contexts.items():
            parts = [context.shard(x).transpose(1, 2) for x in whole]
            passes[layout] = differentiate(partial(context.attention, backend=backend), parts)
        return passes

    def time(self, passes: dict[str, Pass], rounds: int) -> dict[str, dict[str, Any]]:
        """Return seconds of a call by contender: median of the rounds, on the slowest rank."""
        calls = {}
        for name, run in passes.items():
            self._seconds(run, 1)
            calls[name] = max(1, min(MAX_CALLS, int(ROUND_SECONDS / max(self._seconds(run, 1)))))
        samples: dict[str, list[list[float]]] = {name: [] for name in passes}
        for turn in range(rounds):
            for name in passes if turn % 2 == 0 else reversed(passes):
                samples[name].append(self._seconds(passes[name], calls[name]))
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
        torch.cuda.synchronize(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        gathered = [torch.zeros(1, device=self.device) for _ in range(self.size)]
        dist.all_gather(gathered, torch.tensor([start.elapsed_time(end) / 1e3 / calls], device=self.device))
        return [float(x) for x in gathered]


def compare(timed: dict[str, dict[str, Any]], flops: int, num_ranks: int) -> float:
    """Write rates, shares of the ideal, and speed relative to the ring into `timed`; return the ideal's seconds."""
    ideal: float = 1 / sum(1 / seconds for seconds in timed[ALONE]["seconds_by_rank"])
    for name, run in timed.items():
        run["flops_per_second_and_device"] = flops / run["seconds"] / (1 if name == ALONE else num_ranks)
        if name != ALONE:
            run["share_of_ideal"] = ideal / run["seconds"]
            run["speed_over_ring"] = timed["ring"]["seconds"] / run["seconds"]
    return ideal


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=SEQ_LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    device = join_ranks("cuda")
    bench = Bench(device)
    results: dict[str, Any] = {
        "environment": describe_environment(),
        "device": torch.cuda.get_device_name(device),
        "num_devices": bench.size,
        "versions": {"cudnn": torch.backends.cudnn.version(), "nccl": list(torch.cuda.nccl.version())},
        "heads": {"num_heads": NUM_HEADS, "query_groups": NUM_GROUPS, "head_size": HEAD_SIZE},
        "cells": [],
    }
    for backend in BACKENDS:
        for seq_length in options.seq_lengths:
            timed = bench.time(bench.passes(seq_length, backend), options.rounds)
            cell = {"seq_length": seq_length, "backend": backend, "rounds": options.rounds, "timed": timed}
            cell["ideal_seconds"] = compare(timed, flops_of(seq_length), bench.size)
            results["cells"].append(cell)
            if dist.get_rank() == 0:
                write_results(options.out, results)
                print(f"S={seq_length} {backend}: {timed}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
