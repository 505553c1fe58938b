"""Experts spread over several devices, forward and backward, in each expert mode.

    torchrun --nproc-per-node 2 -m benchmarks.expert_modes --out benchmarks/results/NAME.json

The shapes are those of published models, in bfloat16, with uniform routing and Zipf(1). Every rank draws routes of its
own. Seconds are wall-clock time of the slowest rank: the median of rounds in which all modes take turns. Every mode's
output is first compared with the plain mode's.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.environment import describe_environment, kernels_digest, write_results
from benchmarks.rank_runs import join_ranks, slowest_seconds
from bexp.explorer.dimensions.expert_modes import OVERLAP_DEGREES, SHADOWED_EXPERTS
from bexp.explorer.model.model import MoESpec
from bexp.explorer.model.routes import draw_routes
from bexp.explorer.model.routing import RoutingSpec
from bexp.kernels.context_parallel.ring import ring_group
from bexp.kernels.expert_parallel.experts import ExpertParallel
from bexp.kernels.experts.registry import expert_backend

TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class Shape:
    """The experts of a layer, and the tokens of a rank."""

    hidden_size: int
    moe: MoESpec
    tokens: tuple[int, ...]


def _shape(hidden: int, width: int, experts: int, top_k: int, tokens: tuple[int, ...]) -> Shape:
    return Shape(hidden, MoESpec(num_experts=experts, top_k=top_k, expert_ffn_hidden_size=width), tokens)


SHAPES = {
    "cuda": {
        "olmoe-1b-7b": _shape(2048, 1024, 64, 8, (8192, 32768)),
        "qwen3-30b-a3b": _shape(2048, 768, 128, 8, (8192, 32768)),
        "mixtral-8x7b": _shape(4096, 14336, 8, 2, (8192, 32768)),
    },
    "cpu": {"tiny": _shape(64, 64, 16, 2, (256,))},
}


class Bench:
    """What all modes of a shape, a number of tokens and a routing share."""

    def __init__(self, shape: Shape, routing: RoutingSpec, tokens: int, backend: str, device: torch.device) -> None:
        self.group = ring_group()
        self.shape, self.device = shape, device
        self.experts = expert_backend(backend).forward
        size, moe, hidden = self.group.size(), shape.moe, shape.hidden_size
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(self.group.rank())

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=dtype)

        local, width = moe.num_experts // size, moe.expert_ffn_hidden_size
        self.x = normal(tokens, hidden).requires_grad_()
        self.weights = torch.rand(tokens, moe.top_k, device=device).to(dtype).requires_grad_()
        self.w_in = (normal(local, hidden, 2 * width) / hidden**0.5).requires_grad_()
        self.w_out = (normal(local, width, hidden) / width**0.5).requires_grad_()
        self.gradient = normal(tokens, hidden)
        drawn = draw_routes(moe, routing, tokens, np.random.default_rng(self.group.rank()))
        self.routes = torch.from_numpy(drawn).to(device)
        counts = torch.bincount(self.routes.flatten(), minlength=moe.num_experts)
        dist.all_reduce(counts, group=self.group)
        self.popular: list[int] = counts.argsort(descending=True, stable=True).tolist()

    def modes(self) -> dict[str, ExpertParallel]:
        """Every mode by name."""
        make = partial(ExpertParallel, self.group, self.shape.moe.num_experts, self.experts)
        runs = {"plain": make()}
        runs |= {f"overlapped {degree}": make(overlap_degree=degree) for degree in OVERLAP_DEGREES}
        for number in SHADOWED_EXPERTS:
            if number <= self.shape.moe.num_experts:
                runs[f"shadowed {number}"] = make(shadowed_experts=tuple(sorted(self.popular[:number])))
        return runs

    def run(self, mode: ExpertParallel) -> Tensor:
        """Run forward and backward and return the output."""
        out = mode(self.x, self.routes, self.weights, self.w_in, self.w_out, "silu")
        out.backward(self.gradient)
        for leaf in (self.x, self.weights, self.w_in, self.w_out):
            leaf.grad = None
        return out.detach()

    def compare(self, rounds: int) -> dict[str, Any]:
        """Return each mode's seconds, its gain over plain, its peak bytes, and how far its output is from plain's."""
        modes, measured = self.modes(), {}
        plain = self.run(modes["plain"]).double()
        samples: dict[str, list[float]] = {}
        for name, mode in modes.items():
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            error = float((self.run(mode).double() - plain).norm() / plain.norm())
            assert error <= TOLERANCES[self.x.dtype], f"{name} is wrong by {error:.2g}"
            peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
            measured[name] = {"error": error, "peak_bytes": peak}
        for turn in range(rounds):
            for name in modes if turn % 2 == 0 else reversed(modes):
                samples.setdefault(name, []).append(
                    slowest_seconds(partial(self.run, modes[name]), self.device, calls=3)
                )
        medians = {name: statistics.median(each) for name, each in samples.items()}
        for name, row in measured.items():
            spread = max(samples[name]) - min(samples[name])
            row |= {"seconds": medians[name], "spread_seconds": spread, "gain": medians["plain"] / medians[name]}
        return measured


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cuda")
    parser.add_argument("--backend", default="grouped_mm")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    kind = options.device
    device = join_ranks(kind)
    device_name = torch.cuda.get_device_name(device) if kind == "cuda" else "cpu"
    setting: dict[str, Any] = {"device": device_name, "num_devices": dist.get_world_size(), "backend": options.backend}
    setting["kernels"] = kernels_digest()
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES[kind].items():
        for tokens, routing in product(shape.tokens, ("uniform", "zipf")):
            bench = Bench(shape, RoutingSpec.model_validate({"kind": routing}), tokens, options.backend, device)
            modes = bench.compare(options.rounds)
            best = max(modes, key=lambda mode: modes[mode]["gain"])
            rows.append({"model": name, "tokens": tokens, "routing": routing, "best": best, "modes": modes})
            if dist.get_rank() == 0:
                print(f"{name} {tokens} {routing}: {best} {modes[best]['gain']:.2f}x over plain", flush=True)
                write_results(options.out, {"environment": describe_environment(), **setting, "rows": rows})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
