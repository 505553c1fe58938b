"""transformers' Trainer and its subclasses in a command that runs with an answer: they get its sizes and settings."""

from __future__ import annotations

import os
from functools import wraps
from inspect import signature
from threading import Event
from types import ModuleType
from typing import Any

import torch

from bexp.trainer.model_setup import apply, inner_model
from bexp.trainer.recommended_setup import RecommendedSetup
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import SettingsError
from bexp.tune import promise
from bexp.tune.link import SIZE, STEPS, choice, switch_off
from bexp.tune.placeholders import APPLIED, APPLY, FIXED_SIZES, owner_of_sizes, settings_of

is_used = Event()
"""Set once this process has made a Trainer."""


def patch(module: ModuleType) -> None:
    """Have the Trainers that are made from now on train with the answer."""
    from transformers.trainer_callback import TrainerCallback  # noqa: PLC0415 - the command has imported it

    class Pauses(TrainerCallback):
        """Leaves the Trainer's work between steps out of their seconds."""

        def on_log(self, *_: Any, **__: Any) -> None:
            promise.begin_again()

        on_evaluate = on_save = on_log

        def on_step_begin(self, args: Any, *_: Any, **__: Any) -> None:
            answer.check_kept(args)

    init, train, answer = module.Trainer.__init__, module.Trainer.train, _Answer()
    parameters = list(signature(init).parameters)

    @wraps(init)
    def make(self: Any, *given: Any, **named: Any) -> None:
        is_used.set()
        dataset = (dict(zip(parameters, (self, *given), strict=False)) | named).get("train_dataset")
        has_data = dataset is not None or type(self).get_train_dataloader is not module.Trainer.get_train_dataloader
        all_arguments = [each for each in (*given, *named.values()) if isinstance(each, module.TrainingArguments)]
        if not all_arguments:
            all_arguments = [module.TrainingArguments(output_dir="tmp_trainer")]  # as the Trainer makes them
            named["args"] = all_arguments[0]
        taken = [arguments for arguments in all_arguments if answer.apply(arguments, has_data=has_data)]
        init(self, *given, **named)
        if self.args in taken:
            apply_choice(self.model, choice(), self.args.per_device_train_batch_size)
        self.add_callback(Pauses())

    @wraps(train)
    def train_with_answer(self: Any, *given: Any, **named: Any) -> Any:
        answer.check(self.args)
        return train(self, *given, **named)

    module.Trainer.__init__, module.Trainer.train = make, train_with_answer


class _Answer:
    """The answer's sizes, which replace those of the command's first Trainer with data to train on.

    A Trainer of other sizes was not measured, and keeps its own.
    """

    def __init__(self) -> None:
        self._own: tuple[int, int] | None = None
        self._has_trained = False

    def apply(self, arguments: Any, *, has_data: bool) -> bool:
        """Give arguments the answer if it is for them, and return whether it is."""
        sizes = _sizes_of(arguments)
        if self._own is None and has_data:
            self._own = sizes
            promise.takers.append(lambda _: None)  # the Trainer takes as many steps as are set
        answer = self._in_place_of(sizes)
        if self._own is None or sizes not in (self._own, answer):
            return False
        owner = owner_of_sizes(arguments)
        if owner is not None and sizes != answer:
            raise promise.CannotApplyError(f"{owner} {FIXED_SIZES}")
        if getattr(arguments, "auto_find_batch_size", False):
            arguments.auto_find_batch_size = False
            switch_off("auto_find_batch_size")
        arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = answer
        arguments.bexp_given = answer
        for name, value in choice().items():
            if name != APPLY:
                setattr(arguments, name, value)
        return True

    @staticmethod
    def check_kept(arguments: Any) -> None:
        """Raise if the command has changed the sizes that these arguments were given."""
        sizes, given = _sizes_of(arguments), getattr(arguments, "bexp_given", None)
        if given not in (None, sizes):
            raise promise.CannotApplyError(
                f"the command has changed its sizes to micro-batches of {sizes[0]} and {sizes[1]} accumulation steps "
                f"while it trained, and the answer is for {given[0]} and {given[1]}"
            )

    def check(self, arguments: Any) -> None:
        """Raise if the first training has other sizes than the answer."""
        sizes = _sizes_of(arguments)
        answer = self._in_place_of(sizes)
        if not self._has_trained and sizes != answer:
            raise promise.CannotApplyError(
                f"the first Trainer that trains has micro-batches of {sizes[0]} and {sizes[1]} accumulation steps, and "
                f"not the answer's {answer[0]} and {answer[1]}: set them in the command or in the script"
            )
        self._has_trained = True

    def _in_place_of(self, sizes: tuple[int, int]) -> tuple[int, int]:
        steps = os.environ.get(STEPS)  # not set if the batch is not known
        return int(os.environ[SIZE]), (self._own or sizes)[1] if steps is None else int(steps)


def _sizes_of(arguments: Any) -> tuple[int, int]:
    return arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps


def usable(model: Any) -> list[str]:
    """Return the values to try: none, all kernels whose checks this model passes, and these with compiled layers.

    Layers are compiled only on a GPU.
    """
    kernels = [name for name in APPLIED if name != "compile" and _passes(model, name)]
    values = ["none", "+".join(kernels)] if kernels else ["none"]
    return [*values, "+".join([*kernels, "compile"])] if torch.cuda.is_available() else values


def apply_choice(model: Any, choice: dict[str, Any], size: int) -> None:
    """Set up a model as a trial or an answer says, by `bexp.apply`."""
    value = choice.get(APPLY, "none")
    if value != "none":
        apply(model, RecommendedSetup(settings_of(value), micro_batch_size=size))


def _passes(model: Any, name: str) -> bool:
    try:
        set_up(inner_model(model), settings_of(name)).undo()
    except SettingsError:
        return False
    return True
