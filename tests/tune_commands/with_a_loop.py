"""Trains a tiny network in a loop of its own, whose size is an argument."""

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
    parser.add_argument("--fail-from", type=int, default=1 << 30)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.batch >= options.fail_from:
        raise MemoryError("out of memory")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(1000):
        for _ in range(options.accumulate):
            x = torch.randn(options.batch, 256)
            loss = (model(x) - x).square().mean() / options.accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    options.output.write_text("finished")


if __name__ == "__main__":
    main()
