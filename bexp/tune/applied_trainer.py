"""transformers' Trainer and its children in a command that runs with an answer: they get its sizes and settings."""

from __future__ import annotations

import os
from functools import wraps
from types import ModuleType
from typing import Any

from bexp.tune import promise
from bexp.tune.applied_settings import apply_choice
from bexp.tune.link import SIZE, STEPS, choice
from bexp.tune.placeholders import APPLY

made: list[tuple[int, int]] = []
"""The sizes that the command gives to its first Trainer. Another Trainer of other sizes was not measured."""


def patch(module: ModuleType) -> None:
    """Have the Trainers that are made from now on train with the answer."""
    from transformers.trainer_callback import TrainerCallback  # noqa: PLC0415 - the command has imported it

    class Pauses(TrainerCallback):
        """Keeps what the Trainer does between steps out of their seconds."""

        def on_log(self, *_: Any, **__: Any) -> None:
            promise.begin_again()

        on_evaluate = on_save = on_log

    init = module.Trainer.__init__

    @wraps(init)
    def make(self: Any, *given: Any, **named: Any) -> None:
        found = [each for each in (*given, *named.values()) if isinstance(each, module.TrainingArguments)]
        if not found:
            found = [module.TrainingArguments(output_dir="tmp_trainer")]  # as the Trainer makes them
            named["args"] = found[0]
        taken = [arguments for arguments in found if _apply(arguments)]
        init(self, *given, **named)
        if self.args in taken:
            apply_choice(self.model, choice(), self.args.per_device_train_batch_size)
        self.add_callback(Pauses())

    module.Trainer.__init__ = make


def _apply(arguments: Any) -> bool:
    """Give arguments the answer, if it is for them; returns whether it is."""
    own = (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
    if not made:
        made.append(own)
        promise.takers.append(lambda _: None)  # its steps are as many as it is told
    if own != made[0]:
        return False
    steps = os.environ.get(STEPS)  # it is not there if the batch is not known
    arguments.per_device_train_batch_size = int(os.environ[SIZE])
    arguments.gradient_accumulation_steps = own[1] if steps is None else int(steps)
    for name, value in choice().items():
        if name != APPLY:
            setattr(arguments, name, value)
    return True
