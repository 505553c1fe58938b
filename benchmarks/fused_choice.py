"""Forward and backward of the fused experts with other kernels than the chosen ones, in published models' shapes.

    python -m benchmarks.fused_choice --out results/NAME.json [--models NAME ...]

The ways run in turns, by the clock and on the device. `without fused/hopper` has no GEMMs that are written for Hopper
but the sums over rows. `rows by expert` multiplies by the grouped GEMM's kernel, whose rows stay in the experts' order;
the sums to tokens gather them (with one expert a token there are none, and the kernel writes each row to its token).
`rows by token` multiplies by Triton's kernel, which writes each row to its place. The chosen
tiles are one of the two. The errors of a way are its differences from the chosen one. If the file exists, its rows are
kept, and the missing ones are measured. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.continuation import begin
from benchmarks.environment import describe_environment, write_results
from benchmarks.expert_reference import relative_error
from benchmarks.launch_cases import Layer, both_ways, layer_inputs
from bexp.kernels.experts.auto.digest import kernels_digest
from bexp.kernels.experts.fused.hopper.tiles import HopperRows
from bexp.kernels.experts.fused.tiles import FusedTiles, default_tiles, on_hopper_tiles
from bexp.measure.turns import TurnsBudget, time_in_turns

MODELS = {
    "128 experts of 1408": (Layer(0, 128, 1, 2048, 1408), (16384, 131072)),
    "8 experts of 1408": (Layer(0, 8, 2, 2048, 1408), (8192, 131072)),
    "OLMoE-1B-7B": (Layer(0, 64, 8, 2048, 1024), (1024, 1536, 4096, 16384, 65536)),
    "Qwen3-30B-A3B": (Layer(0, 128, 8, 2048, 768), (1536, 2048, 3072, 4096, 16384, 65536)),
    "Mixtral-8x7B": (Layer(0, 8, 2, 4096, 14336), (512, 4096, 16384)),
}
BUDGET = TurnsBudget(rounds=15, most_seconds=2.5)
TOLERANCE = 2e-2
PARTS = ("out", "x", "weights", "w_in", "w_out")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line a way and write one JSON file; returns 1 if a result is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fused_choice", description="Tiles of the fused experts."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    fresh: dict[str, Any] = {
        "environment": describe_environment(),
        "device": torch.cuda.get_device_name(device),
        "kernels": kernels_digest(),
        "rows": [],
    }
    try:
        results = begin(options.out, fresh, same=("device", "kernels"))
    except ValueError as error:
        parser.error(str(error))
    rows = results["rows"]
    done = {(row["model"], row["layer"]["num_tokens"]) for row in rows}
    for name in options.models:
        layer, sizes = MODELS[name]
        for num_tokens in sizes:
            if (name, num_tokens) not in done:
                rows.append(measure(name, replace(layer, num_tokens=num_tokens), device))
                write_results(options.out, results)
    wrong = [row for row in rows if not max(row["errors"].values()) <= TOLERANCE]
    for row in wrong:
        print(f"wrong: {row}", file=sys.stderr)
    return 1 if wrong else 0


def ways_of(layer: Layer) -> dict[str, FusedTiles]:
    """The tiles that are compared, the chosen ones first."""
    sizes = (layer.num_experts, True, 2)
    chosen = default_tiles(layer.num_tokens, layer.top_k, *sizes, on_hopper=True)
    in_triton = default_tiles(layer.num_tokens, layer.top_k, *sizes)
    by_token = chosen.replaced(down_gemm=in_triton.down_gemm, grad_input=in_triton.grad_input)
    ways = {
        "without fused/hopper": on_hopper_tiles(in_triton, projections=False, products=False),
        "rows by token": by_token,
        "rows by expert": by_token.replaced(down_gemm=HopperRows(), grad_input=HopperRows()),
        "rows by expert, forward": by_token.replaced(down_gemm=HopperRows()),
        "rows by expert, backward": by_token.replaced(grad_input=HopperRows()),
    }
    return {"chosen": chosen} | {name: tiles for name, tiles in ways.items() if tiles != chosen}


def measure(name: str, layer: Layer, device: torch.device) -> dict[str, Any]:
    """Every way in turns."""
    from bexp.kernels.experts.fused.function import fused_ffn  # noqa: PLC0415 - needs Triton

    inputs, routes, grad = layer_inputs(layer, device)
    runs: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for way, tiles in ways_of(layer).items():

        def forward(x: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, tiles: FusedTiles = tiles) -> Tensor:
            return fused_ffn(x, routes, weights, w_in, w_out, "silu", tiles)

        runs[way] = partial(both_ways, forward, inputs, (), grad)
    wanted = runs["chosen"]()
    errors = {
        f"{way} {part}": relative_error(actual, expected)
        for way, run in runs.items()
        if way != "chosen"
        for part, actual, expected in zip(PARTS, run(), wanted, strict=True)
    }
    del wanted
    torch.cuda.empty_cache()
    timed = time_in_turns(runs, device, BUDGET)
    for way, each in timed.items():
        print(
            f"{name} {layer.num_tokens} tokens, {way}: {each.clock_seconds * 1e3:.3f} ms, "
            f"{each.device_seconds * 1e3:.3f} on the device"
        )
    return {
        "model": name,
        "layer": asdict(layer),
        "errors": errors,
        "seconds": {way: asdict(each) for way, each in timed.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
