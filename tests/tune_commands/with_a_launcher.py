"""Trains a tiny Llama by transformers' Trainer, in as many processes as its launcher starts.

Each process writes the sizes of its micro-batches. One may be killed.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class Options:
    """What a test asks for."""

    seen: str
    """The folder of what each process has seen."""
    kill_from: int = 1 << 30
    """Process 1 is killed at a micro-batch so large."""


class Tokens(Dataset[dict[str, Tensor]]):
    """Samples of one length."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train."""
    options, arguments = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
    arguments.max_steps, arguments.report_to = 10_000, []
    rank, seen = os.environ["RANK"], Path(options.seen)

    def note(module: nn.Module, args: Any, given: dict[str, Tensor]) -> None:
        size = len(given["input_ids"])
        with (seen / rank).open("a") as file:
            file.write(f"{size}\n")
        if rank == "1" and size >= options.kill_from:
            os.kill(os.getpid(), signal.SIGKILL)

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    model.register_forward_pre_hook(note, with_kwargs=True)
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
