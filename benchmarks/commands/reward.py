"""A reward model of 0.5 billion parameters on pairs of texts, by a child of transformers' Trainer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Trainer, TrainingArguments

from benchmarks.commands.texts import Texts, Watch, add_arguments, padded, save_strategy

SIZES: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class Pairs(Dataset[dict[str, Any]]):
    """Each text with its neighbour: the first is the better one."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts) - 1

    def __getitem__(self, place: int) -> dict[str, Any]:
        names = ("chosen_input_ids", "rejected_input_ids")
        return {name: self._texts[place + i]["input_ids"] for i, name in enumerate(names)}


def pair(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """All better texts, then all worse ones, padded to the longest."""
    texts = [{"input_ids": sample[name]} for name in ("chosen_input_ids", "rejected_input_ids") for sample in samples]
    return {name: value for name, value in padded(texts).items() if name != "labels"}


class RewardTrainer(Trainer):
    """Trains the difference of two rewards."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any) -> Any:
        """Return the negative log-likelihood that the better text is preferred (Bradley and Terry)."""
        output = model(**inputs)
        better, worse = output.logits.squeeze(-1).chunk(2)
        loss = -logsigmoid(better - worse).mean()
        return (loss, output) if return_outputs else loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    sizes = TINY | {"vocab_size": 512} if options.tiny else SIZES
    config = Qwen2Config(**sizes | {"num_labels": 1, "pad_token_id": 0})
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        max_steps=options.max_steps,
        bf16=torch.cuda.is_available(),
        remove_unused_columns=False,
        save_strategy=save_strategy(options),
        save_steps=500,
        report_to=[],
    )
    with arguments.device:
        model = Qwen2ForSequenceClassification(config)
    pairs = Pairs(Texts(options, 128 if options.tiny else 1024, config.vocab_size))
    watch = Watch(options.per_device_train_batch_size * options.gradient_accumulation_steps)
    RewardTrainer(model=model, args=arguments, train_dataset=pairs, data_collator=pair, callbacks=[watch]).train()
    watch.tell()


if __name__ == "__main__":
    main()
