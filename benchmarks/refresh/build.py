"""Builds the kernels of one contender, so that a later process finds them in Triton's cache.

    python -m benchmarks.refresh.build gemm CONTENDER EXPERTS
    python -m benchmarks.refresh.build layer CONTENDER EXPERTS TOP_K MICRO_BATCH ...

Each size runs forward and backward once. The exit status is 1 if a size failed; the other sizes are still built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gemm_contenders import OURS, problem
from benchmarks.kernels import TOKENS, K, N
from benchmarks.moe_contenders import dense_block, hidden_states, layer_block
from benchmarks.moe_layer import SEQ_LENGTH

MOST_ROWS = 1 << 17
"""Larger products choose the kernels of this one."""
COMPILED_DENSE = "dense compile"


def main(arguments: list[str] | None = None) -> int:
    """Build what the arguments name, on the current CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refresh.build", description="Builds kernels.")
    parser.add_argument("kind", choices=("gemm", "layer"))
    parser.add_argument("contender")
    parser.add_argument("sizes", nargs="+", type=int, help="gemm: EXPERTS; layer: EXPERTS TOP_K MICRO_BATCH ...")
    options = parser.parse_args(arguments)
    if options.kind == "gemm" and options.contender not in OURS:
        parser.error(f"{options.contender} is none of {', '.join(OURS)}")
    if options.kind == "layer" and len(options.sizes) < 3:
        parser.error("a layer needs EXPERTS, TOP_K and a MICRO_BATCH")
    return run_each(runs(options.kind, options.contender, options.sizes, torch.device("cuda")))


def runs(kind: str, contender: str, sizes: list[int], device: torch.device) -> dict[str, Callable[[], None]]:
    """Return what is to run, by the name of its size."""
    if kind == "gemm":
        (experts,) = sizes
        tokens = [each for each in TOKENS if each * experts <= MOST_ROWS]
        return {f"{each} tokens": partial(run_gemm, contender, experts, each, device) for each in tokens}
    experts, top_k, *micro_batches = sizes
    return {f"m={each}": partial(run_layer, contender, experts, top_k, each, device) for each in micro_batches}


def run_each(todo: dict[str, Callable[[], None]]) -> int:
    """Run all of it; print what failed, and return 1 if anything did."""
    failed = False
    for name, run in todo.items():
        try:
            run()
        except Exception as error:  # noqa: BLE001 - other sizes are still to be built
            failed = True
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return int(failed)


def run_gemm(contender: str, num_experts: int, tokens: int, device: torch.device) -> None:
    """Forward and backward of a grouped GEMM with as many rows for each expert."""
    operands = OURS[contender](problem((tokens,) * num_experts, K, N, torch.bfloat16, device))
    torch.autograd.backward(operands.multiply(operands.x, operands.w), operands.grad)
    torch.cuda.synchronize(device)


def run_layer(contender: str, num_experts: int, top_k: int, micro_batch: int, device: torch.device) -> None:
    """Forward and backward of a layer, or of the compiled dense one."""
    if contender == COMPILED_DENSE:
        block = dense_block("layer", top_k, device, compiled=True)
    else:
        block = layer_block(contender, num_experts, top_k, micro_batch * SEQ_LENGTH, device)
    x = hidden_states(micro_batch, SEQ_LENGTH, device).requires_grad_()
    out = block(x)
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize(device)
    del block, x, out
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
