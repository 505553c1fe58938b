"""Trains a tiny network with two optimizers in a loop of its own, whose size is an argument."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn


def main() -> None:
    """Train, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--total", type=int, help="sequences of an optimizer step, in place of --accumulate")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--raise-at", type=int, help="a step that raises an error")
    parser.add_argument("--fail-from", type=int, default=1 << 30)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.batch >= options.fail_from:
        raise MemoryError("out of memory")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    first, last = model[0].parameters(), model[2].parameters()
    optimizers = [torch.optim.SGD(first, lr=0.01), torch.optim.AdamW(last)]
    accumulate = options.accumulate if options.total is None else options.total // options.batch
    for step in range(options.steps):
        if step == options.raise_at:
            raise RuntimeError("no such step")
        for _ in range(accumulate):
            x = torch.randn(options.batch, 256)
            loss = (model(x) - x).square().mean() / accumulate
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    options.output.write_text("finished")


if __name__ == "__main__":
    main()
