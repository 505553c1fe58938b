"""Full fine-tuning of a Llama of 1.2 billion parameters on texts of varied lengths, by transformers' Trainer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.commands.texts import Texts, Watch, add_arguments, padded, save_strategy

SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


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
        learning_rate=1e-5,
        save_strategy=save_strategy(options),
        save_steps=500,
        logging_steps=100,
        report_to=[],
    )
    watch = Watch(options.per_device_train_batch_size * options.gradient_accumulation_steps)
    texts = Texts(options, 128 if options.tiny else 2048, config.vocab_size)
    Trainer(model=model, args=arguments, train_dataset=texts, data_collator=padded, callbacks=[watch]).train()
    watch.tell()


if __name__ == "__main__":
    main()
