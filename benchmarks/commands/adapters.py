"""LoRA of a Llama of 8 billion parameters on packed texts of 2,048 tokens, by transformers' Trainer and peft."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from benchmarks.commands.texts import Texts, Watch, add_arguments, save_strategy

SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


class Packed(Dataset[dict[str, Any]]):
    """Texts one after the other, cut into samples of one length; positions start anew with each text."""

    def __init__(self, texts: Texts, length: int) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        for place in range(len(texts)):
            text = texts[place]["input_ids"]
            tokens += text
            positions += range(len(text))
        self._samples = [
            {"input_ids": tokens[i : i + length], "position_ids": positions[i : i + length]}
            for i in range(0, len(tokens) - length, length)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> dict[str, Any]:
        sample = self._samples[place]
        return sample | {"labels": sample["input_ids"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    config = LlamaConfig(**(TINY | {"vocab_size": 512} if options.tiny else SIZES), dtype="bfloat16")
    has_gpu = torch.cuda.is_available()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if has_gpu else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        max_steps=options.max_steps,
        bf16=True,
        gradient_checkpointing=True,
        learning_rate=2e-4,
        save_strategy=save_strategy(options),
        save_steps=500,
        logging_steps=100,
        report_to=[],
    )
    length = 128 if options.tiny else 2048
    texts = Packed(Texts(argparse.Namespace(longest=None), length, config.vocab_size), length)
    watch = Watch(options.per_device_train_batch_size * options.gradient_accumulation_steps)
    Trainer(
        model=get_peft_model(model, adapters),
        args=arguments,
        train_dataset=texts,
        data_collator=default_data_collator,
        callbacks=[watch],
    ).train()
    watch.tell()


if __name__ == "__main__":
    main()
