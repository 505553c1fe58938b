"""Texts of unequal length, and what pads them: without transformers, whose import takes seconds."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

LONGEST = 512


class Texts(Dataset[dict[str, list[int]]]):
    """Random tokens, 8 to 64 of them; one text has 128. With a long tail, most are short, and some have LONGEST."""

    def __init__(self, number: int, *, long_tail: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 65, (number,), generator=generator).tolist()
        lengths[number // 2] = 128
        if long_tail:
            lengths = torch.randn(number, generator=generator).mul(1.2).add(3).exp().clamp(8, LONGEST).int().tolist()
        self._texts = [torch.randint(0, 200, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        return {"input_ids": self._texts[place]}


class Padded:
    """Pads a batch to its longest text."""

    def __call__(self, samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        padded = torch.zeros(len(samples), longest, dtype=torch.long)
        labels = torch.full((len(samples), longest), -100)
        for row, sample in enumerate(samples):
            tokens = torch.tensor(sample["input_ids"])
            padded[row, : len(tokens)] = labels[row, : len(tokens)] = tokens
        return {"input_ids": padded, "labels": labels}
