"""Pre-training of a Llama of 0.5 billion parameters on samples of 1,024 tokens, compiled by transformers' Trainer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from benchmarks.commands.texts import Watch, add_arguments, save_strategy

SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


class Samples(Dataset[dict[str, Any]]):
    """Random tokens."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._tokens = torch.randint(vocabulary, (4096, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"input_ids": self._tokens[place], "labels": self._tokens[place]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    config = LlamaConfig(**(TINY | {"vocab_size": 512} if options.tiny else SIZES))
    has_gpu = torch.cuda.is_available()
    with torch.device("cuda" if has_gpu else "cpu"):
        model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        max_steps=options.max_steps,
        bf16=has_gpu,
        torch_compile=True,
        learning_rate=3e-4,
        save_strategy=save_strategy(options),
        save_steps=500,
        logging_steps=100,
        report_to=[],
    )
    watch = Watch(options.per_device_train_batch_size * options.gradient_accumulation_steps)
    texts = Samples(128 if options.tiny else 1024, config.vocab_size)
    Trainer(
        model=model, args=arguments, train_dataset=texts, data_collator=default_data_collator, callbacks=[watch]
    ).train()
    watch.tell()


if __name__ == "__main__":
    main()
