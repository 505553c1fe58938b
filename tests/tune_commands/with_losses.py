"""Trains a tiny model with a child of transformers' Trainer, whose loss suits accumulation or does not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, OlmoeConfig, OlmoeForCausalLM, Trainer, TrainingArguments

MASK = 255


class Texts(Dataset[dict[str, list[int]]]):
    """Random tokens, 8 to 64 of them, or all of one length."""

    def __init__(self, length: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 65, (100,), generator=generator).tolist()
        self._texts = [torch.randint(0, 200, (length or own,), generator=generator).tolist() for own in lengths]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        return {"input_ids": self._texts[place]}


class Stream(IterableDataset[dict[str, list[int]]]):
    """The same without an order of one's own."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self._texts[place] for place in range(len(self._texts)))


def padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, mask = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for row, sample in enumerate(samples):
        text = torch.tensor(sample["input_ids"])
        tokens[row, : len(text)] = labels[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def masked(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Hides tokens that are drawn anew each time."""
    batch = padded(samples)
    is_hidden = (torch.rand(batch["labels"].shape) < 0.15) & (batch["labels"] >= 0)
    hidden = torch.where(is_hidden, MASK, batch["input_ids"])
    return {**batch, "input_ids": hidden, "labels": torch.where(is_hidden, batch["labels"], -100)}


class Averaged(Trainer):
    """Averages over the micro-batch and forgets the number of label tokens in the batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Divided(Averaged):
    """The same, divided by the number of micro-batches."""

    loss_is_scaled_for_ga = False


class Contrastive(Trainer):
    """Tells the two halves of a text from those of the others in its micro-batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        inputs.pop("labels")
        states = model(**inputs, output_hidden_states=True).hidden_states[-1]
        return F.cross_entropy(states[:, 0] @ states[:, 4].T, torch.arange(len(states)))


TRAINERS = {"averaged": Averaged, "divided": Divided, "contrastive": Contrastive}


def build(arguments: Sequence[str] | None = None) -> Trainer:
    """Make the Trainer that the arguments ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss", choices=["own", "router", "masked", *TRAINERS], default="own")
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--by_device", action="store_true", help="count label tokens on each device")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--length", type=int)
    parser.add_argument("--output_dir", required=True)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    texts = Texts(options.length)
    return TRAINERS.get(options.loss, Trainer)(
        model=with_experts() if options.loss == "router" else dense(),
        args=TrainingArguments(
            output_dir=options.output_dir,
            per_device_train_batch_size=options.per_device_train_batch_size,
            gradient_accumulation_steps=options.gradient_accumulation_steps,
            average_tokens_across_devices=not options.by_device,
            bf16=options.bf16,
            use_cpu=True,
            max_steps=10,
            report_to=[],
        ),
        train_dataset=Stream(texts) if options.stream else texts,
        data_collator=masked if options.loss == "masked" else padded,
    )


def dense() -> Any:
    """A model with dropout, which is off while gradients are compared."""
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=256, n_positions=128))


def with_experts() -> Any:
    """A model with a loss that balances its routers."""
    return OlmoeForCausalLM(
        OlmoeConfig(
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=256,
            num_experts=8,
            num_experts_per_tok=2,
            pad_token_id=0,
            eos_token_id=1,
            output_router_logits=True,
        )
    )


if __name__ == "__main__":
    trainer = build()
    trainer.train()
    trainer.save_model()
