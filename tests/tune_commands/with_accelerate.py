"""Trains a tiny network in a loop of accelerate's, which accumulates."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of a loader again and again: how many a trial takes depends on the machine."""
    while True:
        yield from loader


def main() -> None:
    """Train, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--by-hand", type=int, help="accumulate so many micro-batches without accelerate")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--other", choices=["prior", "unread", "evaluation", "midway"], help="how another loader is read"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=1 if options.by_hand else 4)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(512, 256)), batch_size=options.batch, shuffle=True)
    other = DataLoader(loader.dataset, batch_size=1, shuffle=options.other in ("prior", "unread"))
    if options.other in ("prior", "unread"):
        other = accelerator.prepare(other)
    if options.other == "evaluation":
        other, model, optimizer, loader = accelerator.prepare(other, model, optimizer, loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if options.other == "midway":
        other = accelerator.prepare(other)
    priors, own = endless(other), GPT2Config()
    for _ in range(100):
        for number, (x,) in enumerate(loader):
            if options.by_hand:
                accelerator.backward((model(x) - x).square().mean())
                if (number + 1) % options.by_hand:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                continue
            if options.other == "midway" and number == 0:
                list(other)
            own.save_pretrained(options.output.parent / "config")  # as loops keep their newest model
            prior = next(priors)[0] if options.other == "prior" else x[:0]
            with accelerator.accumulate(model):
                accelerator.backward((model(torch.cat([x, prior])) - torch.cat([x, prior])).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    options.output.write_text("finished")


if __name__ == "__main__":
    main()
