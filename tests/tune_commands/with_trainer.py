"""Trains a tiny model with transformers' Trainer, on texts of unequal length, and writes all that a Trainer can."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Subset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.tune_commands.texts import LONGEST, Padded, Texts


class Slow(Trainer):
    """Takes a fixed time for each token of a micro-batch, padding included, and has no memory for large ones."""

    seconds_per_token = 0.0
    let_pass: Callable[[float], None]
    fail_from = fail_from_tokens = 1 << 30
    evaluation_fails_from_tokens = 1 << 30
    fail_if_applied = evaluation_is_broken = False

    def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if self.fail_if_applied and model.loss_function is not ForCausalLMLoss:
            raise RuntimeError(f"the loss is {model.loss_function}")
        if len(inputs["input_ids"]) >= self.fail_from or inputs["input_ids"].numel() >= self.fail_from_tokens:
            raise MemoryError("out of memory")
        if self.seconds_per_token:
            self.let_pass(self.seconds_per_token * inputs["input_ids"].numel())
        return super().training_step(model, inputs, *given, **named)

    def prediction_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if inputs["input_ids"].numel() >= self.evaluation_fails_from_tokens:
            raise MemoryError("out of memory")
        if self.evaluation_is_broken:
            raise ValueError("no such metric")
        return super().prediction_step(model, inputs, *given, **named)


class Saves(TrainerCallback):
    """Saves the model by itself, as callbacks do that keep the best one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.save_pretrained(self._folder)
        model.config.save_pretrained(self._folder)


def main() -> None:
    """Train, evaluate and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--hub_token")
    parser.add_argument("--long_tail", action="store_true")
    parser.add_argument("--seconds_per_token", type=float, default=0.0)
    parser.add_argument("--fail_from", type=int, default=1 << 30)
    parser.add_argument("--fail_from_tokens", type=int, default=1 << 30)
    parser.add_argument("--evaluation_fails_from_tokens", type=int, default=1 << 30)
    parser.add_argument("--evaluation_is_broken", action="store_true")
    parser.add_argument("--fail_if_applied", action="store_true")
    options = parser.parse_args()
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=256, n_positions=LONGEST))
    arguments = TrainingArguments(
        output_dir=str(options.output_dir),
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        num_train_epochs=1,
        report_to=[],
        metric_for_best_model="loss",
    )
    texts = Texts(200, long_tail=options.long_tail)
    some = Subset(texts, range(96, 112))  # with the longest
    given = {"train_dataset": texts, "eval_dataset": some, "data_collator": Padded()}
    trainer = Slow(model=model, args=arguments, callbacks=[EarlyStoppingCallback(1000)], **given)
    if options.seconds_per_token:
        from tests.tune_commands.passing_time import let_pass  # it changes the clock of this process

        trainer.let_pass = let_pass
    trainer.seconds_per_token, trainer.fail_from = options.seconds_per_token, options.fail_from
    trainer.fail_from_tokens = options.fail_from_tokens
    trainer.evaluation_fails_from_tokens = options.evaluation_fails_from_tokens
    trainer.evaluation_is_broken = options.evaluation_is_broken
    trainer.fail_if_applied = options.fail_if_applied
    trainer.add_callback(EarlyStoppingCallback(1000))
    trainer.add_callback(Saves(options.output_dir.with_name("best")))
    before = math.exp(trainer.evaluate()["eval_loss"]), (trainer.predict(some).metrics or {})["test_loss"]
    trainer.train()
    trainer.save_model()
    (options.output_dir / "finished").write_text(f"perplexity and loss before: {before}")


if __name__ == "__main__":
    main()
