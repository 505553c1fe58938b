"""Trains a tiny model with transformers' Trainer, and breaks in one of several ways in a step of the trial."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.tune_commands.texts import Padded, Texts

LINE = "x" * 200
MEGABYTES = 4


def _hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


def _out_of_memory() -> None:
    raise MemoryError("out of memory")


def _leak() -> None:
    """A child in a session of its own that ignores its end, and a crash of this process."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    raise RuntimeError("left a child behind")


def _fork() -> None:
    """A child that goes on as this process does; both end by themselves if nobody ends them."""
    if os.fork() == 0:
        time.sleep(3600)


def _print() -> None:
    for _ in range(MEGABYTES * 5000):
        sys.stdout.write(f"{LINE}\n")


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "crash": lambda: sys.exit("the training breaks"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": _hang,
    "out_of_memory": _out_of_memory,
    "leak": _leak,
    "fork": _fork,
    "print": _print,
}
STARTS = ("kill", "hang", "crash", "leak")
"""Faults that also strike before training begins."""


def main() -> None:
    """Train until the fault strikes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--at", type=int, default=3, help="micro-step; 0: before training begins")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    if options.at == 0:
        FAULTS[options.fault]()
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=256, n_positions=128))
    arguments = TrainingArguments(
        output_dir=str(options.output_dir),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=1,
        logging_steps=1,
        num_train_epochs=1,
        report_to=[],
    )

    class Faulty(Trainer):
        num_calls = 0

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == options.at:
                FAULTS[options.fault]()
            return super().compute_loss(*given, **named)

    trainer = Faulty(model=model, args=arguments, train_dataset=Texts(200, long_tail=False), data_collator=Padded())
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
