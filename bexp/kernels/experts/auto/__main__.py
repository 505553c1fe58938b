"""`python -m bexp.kernels.experts.auto`: measures a layer's experts beforehand, so that `auto` knows what to choose."""

from __future__ import annotations

import argparse
import sys

import torch

from bexp.kernels.experts.auto.measuring import FFNShape
from bexp.kernels.experts.auto.plans import table_of
from bexp.kernels.experts.registry import AUTO, AUTO_EXPERTS
from bexp.kernels.shapes import ExpertsShape

DTYPES = ("bfloat16", "float16")


def main(arguments: list[str] | None = None) -> int:
    """Measure what the table lacks and print what is chosen; returns 1 if there is nothing to choose from here."""
    parser = argparse.ArgumentParser(
        prog="python -m bexp.kernels.experts.auto",
        description="Measure the expert kernels of a layer on this machine for the expert back end `auto`.",
    )
    parser.add_argument("--num-experts", type=int, required=True)
    parser.add_argument("--top-k", type=int, required=True)
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--ffn-hidden-size", type=int, required=True, help="of one expert")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="of a micro-batch: its size x seq_length")
    parser.add_argument("--plain", action="store_true", help="the experts' activation is not gated")
    parser.add_argument("--transposed", action="store_true", help="matrices lie as (out, in), as in transformers")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    sizes = (options.hidden_size, options.ffn_hidden_size, options.num_experts, options.top_k)
    reason = AUTO.unsupported_reason(ExpertsShape(*sizes, dtype, gated=not options.plain), device)
    if reason is not None:
        sys.stderr.write(f"{reason}\n")
        return 1
    shape = FFNShape(
        options.num_experts,
        options.top_k,
        options.hidden_size,
        options.ffn_hidden_size,
        not options.plain,
        dtype,
        options.transposed,
    )
    for tokens in options.tokens:
        AUTO_EXPERTS.prepare(shape, [tokens], device)
        chosen = AUTO_EXPERTS.choice(shape, tokens, device, may=False)
        sys.stdout.write(f"{tokens} tokens: {chosen}\n")
    sys.stdout.write(f"the table is {table_of(device).path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
