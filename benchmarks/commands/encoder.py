"""BERT of 335 million parameters learns masked words, in a loop of accelerate's."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

from benchmarks.commands.texts import Texts, Watch, add_arguments, padded

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    config = BertConfig(**(TINY if options.tiny else SIZES), vocab_size=512 if options.tiny else 30522)
    has_gpu = torch.cuda.is_available()
    accelerator = Accelerator(
        gradient_accumulation_steps=options.gradient_accumulation_steps, mixed_precision="bf16" if has_gpu else "no"
    )
    with torch.device(accelerator.device):
        model = BertForMaskedLM(config)
    texts = Texts(options, 128 if options.tiny else 512, config.vocab_size)
    size = options.per_device_train_batch_size
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(texts, batch_size=size, shuffle=True, collate_fn=padded, drop_last=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch = Watch(size * options.gradient_accumulation_steps)
    steps = 0
    while steps != options.max_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            watch.micro_step()
            if accelerator.sync_gradients:
                watch.step()
                steps += 1
            if steps == options.max_steps:
                break
    watch.tell()


if __name__ == "__main__":
    main()
