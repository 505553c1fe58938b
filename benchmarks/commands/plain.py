"""GPT-2 of 355 million parameters in a plain loop of PyTorch's."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.commands.texts import Texts, Watch, add_arguments, padded

SIZES: dict[str, Any] = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257}
TINY: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    config = GPT2Config(**(TINY if options.tiny else SIZES))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = GPT2LMHeadModel(config)
    texts = Texts(options, 128 if options.tiny else 1024, config.vocab_size)
    size, accumulation = options.per_device_train_batch_size, options.gradient_accumulation_steps
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(texts, batch_size=size, shuffle=True, collate_fn=padded, drop_last=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch = Watch(size * accumulation)
    micro_steps = 0
    while micro_steps != options.max_steps * accumulation:
        for batch in loader:
            on_device = {name: value.to(device) for name, value in batch.items()}
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(**on_device).loss / accumulation
            loss.backward()
            micro_steps += 1
            if micro_steps % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            watch.micro_step()
            if micro_steps % accumulation == 0:
                watch.step()
            if micro_steps == options.max_steps * accumulation:
                break
    watch.tell()


if __name__ == "__main__":
    main()
