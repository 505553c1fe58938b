"""Trains a tiny model in a plain loop or accelerate's, on texts of very unequal length that a loader shuffles."""

from __future__ import annotations

import argparse
import operator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset[dict[str, list[int]]]):
    """Random tokens: many short texts, and a long tail."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randn(number, generator=generator).mul(1.2).add(3).exp().clamp(8, 512).int().tolist()
        self._texts = [torch.randint(0, 200, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        return {"input_ids": self._texts[place]}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad a micro-batch to its longest text."""
    texts = [torch.tensor(sample["input_ids"]) for sample in samples]
    return {"input_ids": nn.utils.rnn.pad_sequence(texts, batch_first=True)}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--seconds_per_token", type=float, default=0.0)
    parser.add_argument("--seconds_per_new_width", type=float, default=0.0)
    parser.add_argument("--accelerate", action="store_true")
    options = parser.parse_args()
    from tests.tune_commands.passing_time import let_pass  # it changes the clock of this process

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Texts(200), batch_size=options.batch, shuffle=True, collate_fn=pad)
    backward = operator.methodcaller("backward")
    if options.accelerate:
        from accelerate import Accelerator

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
    widths = set[int]()
    for _ in range(100):
        for number, batch in enumerate(loader, 1):
            width = batch["input_ids"].shape[1]
            let_pass(options.seconds_per_token * batch["input_ids"].numel())
            let_pass(options.seconds_per_new_width * (width not in widths))
            widths.add(width)
            logits = model(batch["input_ids"])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())
            backward(loss / options.accumulate)
            if number % options.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
