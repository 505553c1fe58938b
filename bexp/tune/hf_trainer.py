"""transformers' Trainer and its subclasses in a trial: sizes are set, steps are timed, and nothing is written."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset
from transformers.trainer_callback import EarlyStoppingCallback
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
from transformers.trainer_utils import PredictionOutput

from bexp.explorer.cost.text_batches import Epoch
from bexp.measure.heap import freeze_imports
from bexp.out_of_memory import is_out_of_memory
from bexp.tune.clock import ACCUMULATION, Clock
from bexp.tune.compilation import compile_anew
from bexp.tune.lengths import WORST_TIMES, Lengths
from bexp.tune.link import (
    SCRATCH,
    SIZE,
    CannotSetError,
    choice,
    connect,
    note_failure,
    refusing,
    serving,
    switch_off,
    switched_off,
)
from bexp.tune.micro_batches import epoch_of, order_of, positions_of
from bexp.tune.peak import peak_bytes, reset_peak
from bexp.tune.placeholders import APPLY, FIXED_SIZES, owner_of_sizes, text_of
from bexp.tune.ranks import Ranks
from bexp.tune.reply import describe_parameters, measured
from bexp.tune.saving import save_nothing
from bexp.tune.trainer_accumulation import TrainerCheck

_OFF = {
    "report_to": [],
    "push_to_hub": False,
    "load_best_model_at_end": False,
    "disable_tqdm": True,
    "auto_find_batch_size": False,
    "resume_from_checkpoint": None,
    "eval_on_start": False,
    "do_eval": False,
    "include_num_input_tokens_seen": "no",
}
_FIXED = ("bf16", "fp16", "tf32", "torch_compile", "fsdp", "fsdp_config", "deepspeed", "use_cpu", "parallelism_config")
_UNSAID = ("disable_tqdm", "do_eval")
"""Switched off without a note: a progress bar, and an argument that follows from eval_strategy."""
_NEVER = ("save_strategy", "eval_strategy", "logging_strategy")


def patch(module: ModuleType) -> None:
    """Have every Trainer that is made from now on measure in place of training."""
    trainer = module.Trainer
    init, train = trainer.__init__, trainer.train

    @wraps(init)
    def make(self: Any, *given: Any, **named: Any) -> None:
        found = [each for each in (*given, *named.values()) if isinstance(each, module.TrainingArguments)]
        if not found:
            found = [module.TrainingArguments(output_dir=os.environ[SCRATCH])]
            named["args"] = found[0]
        with refusing():
            for arguments in found:
                _prepare(arguments)
        init(self, *given, **named)
        if APPLY in choice():
            with refusing():
                _refuse_model_init(self)
            apply_to = import_module("bexp.tune.applied_trainer").apply_choice
            apply_to(self.model, choice(), self.args.per_device_train_batch_size)

    @wraps(train)
    def measure(self: Any, *_: Any, **__: Any) -> None:
        _serve(self, partial(train, self))
        os._exit(0)  # the command's code for its end or its failure is not for a trial

    trainer.__init__, trainer.train = make, measure
    for name in ("save_model", "push_to_hub", "save_state", "log_metrics", "save_metrics"):
        setattr(trainer, name, lambda *_, **__: None)
    trainer.evaluate, trainer.predict = _no_evaluation, _no_prediction
    add = module.CallbackHandler.add_callback

    @wraps(add)
    def add_unless_it_stops(self: Any, callback: Any) -> None:
        kind = callback if isinstance(callback, type) else type(callback)
        if issubclass(kind, EarlyStoppingCallback):
            switch_off(kind.__name__)
        else:
            add(self, callback)

    module.CallbackHandler.add_callback = add_unless_it_stops


def _no_evaluation(*_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
    """Return metrics that a script may read of an evaluation that is not run."""
    return defaultdict(float, {f"{metric_key_prefix}_loss": 0.0})


def _no_prediction(*_: Any, metric_key_prefix: str = "test", **__: Any) -> PredictionOutput:
    metrics = _no_evaluation(metric_key_prefix=metric_key_prefix)
    return PredictionOutput(predictions=np.empty(0), label_ids=np.empty(0), metrics=metrics)


def _refuse_model_init(trainer: Any) -> None:
    """Raise CannotSetError if the Trainer would train another model than the present one."""
    if trainer.model_init is not None:
        raise CannotSetError("--apply sets up the model that the Trainer is given, and model_init makes another one")


def _prepare(arguments: Any) -> None:
    """Set what the trial tries, and switch off all that a training writes, or reads in addition to its data."""
    if hasattr(arguments, "bexp_asked"):
        return
    asked = (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
    owner = owner_of_sizes(arguments)
    if owner is not None and SIZE not in os.environ:
        raise CannotSetError(f"{owner} {FIXED_SIZES}")
    for name, value in choice().items():
        if name == APPLY:  # a setting of the model, which is made later
            continue
        if name in _FIXED:
            raise CannotSetError(f"'{name}' is fixed when TrainingArguments are made: put {{{name}}} in the command")
        if not hasattr(arguments, name):
            raise CannotSetError(f"TrainingArguments have no '{name}': put {{{name}}} where the command takes it")
        if isinstance(getattr(arguments, name), bool) and not isinstance(value, bool):
            raise CannotSetError(f"'{name}' is true or false, and not '{text_of(value)}'")
        setattr(arguments, name, value)
    never = {name: type(getattr(arguments, name))("no") for name in _NEVER if hasattr(arguments, name)}
    for name, value in (_OFF | never).items():
        own = getattr(arguments, name, value)
        if own and own != value and name not in _UNSAID:
            switch_off(f"{name}={text_of(getattr(own, 'value', own))}")
        if hasattr(arguments, name):
            setattr(arguments, name, value)
    arguments.output_dir = os.environ[SCRATCH]
    if owner is None:
        arguments.gradient_accumulation_steps = ACCUMULATION
    arguments.bexp_asked = asked


def _serve(trainer: Any, train: Callable[[], Any]) -> None:
    """Describe the training, then measure the sizes that the trial asks for, until it ends."""
    serving.append(trainer)
    save_nothing()
    freeze_imports()
    ranks, link, lengths = Ranks(), connect(), Lengths.of(trainer.train_dataset)
    measure = partial(_measure, trainer, train, trainer.optimizer, lengths, ranks)
    answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "measure": lambda command: measure(command["micro_batch_size"], command.get("accumulation")),
        "evaluate": lambda command: _evaluate(trainer, ranks, command["most_bytes"]),
        "check": TrainerCheck(trainer, train, ranks).answer,
    }
    size, accumulation = trainer.args.bexp_asked
    model = describe_parameters(list(trainer.model.parameters()))
    if link is not None:
        link.send(
            {
                "event": "ready",
                "kind": "transformers' Trainer",
                "takes_sizes": True,
                "class_name": type(trainer.model).__name__,
                "trainer": type(trainer).__name__,
                "micro_batch_size": size,
                "grad_accum_steps": accumulation,
                "num_steps": _num_steps(trainer, ranks.number * size, accumulation),
                "num_devices": ranks.number,
                "lengths": lengths.describe(),
                "evaluation": describe_evaluation(trainer),
                "switched_off": switched_off,
                APPLY: _usable(trainer),
                **model,
            }
        )
    while (command := ranks.share(None if link is None else link.receive())) is not None:
        reply = measured(partial(answers[command["command"]], command))
        if link is not None:
            link.send(reply)
        elif reply["outcome"] != "ok":
            note_failure(reply)
            os._exit(1)  # the launcher ends the others, which wait for this one
        if reply["outcome"] != "ok":
            return


def _num_steps(trainer: Any, samples: int, accumulation: int) -> int | None:
    """Return the optimizer steps of the command's own run, with so many samples at once; None if that is not known."""
    if trainer.args.max_steps > 0:
        return int(trainer.args.max_steps)
    if not hasattr(trainer.train_dataset, "__len__"):
        return None
    each = max(1, math.ceil(math.ceil(len(trainer.train_dataset) / samples) / accumulation))
    return math.ceil(float(trainer.args.num_train_epochs) * each) or None


def _usable(trainer: Any) -> list[str] | None:
    """Return the values of APPLY that this model can have, if the trial asks and the model is as the command has it."""
    if choice().get(APPLY) != "none":
        return None
    found: list[str] = import_module("bexp.tune.applied_trainer").usable(trainer.model)
    return found


def _evaluate(trainer: Any, ranks: Ranks, most_bytes: int) -> dict[str, Any]:
    """Return the memory of an evaluation in the fullest process. If that exceeds `most_bytes`, add a change that fits.

    `fitting_size` is the first batch size, halved again and again, whose batch fits without what the Trainer keeps.
    Several processes try no other size. `fitting_steps` are the eval_accumulation_steps with which the outputs on a GPU
    fit.
    """
    arguments = trainer.args
    own: int = arguments.per_device_eval_batch_size
    size, tried = own, dict[int, dict[str, float] | None]()
    while ranks.number == 1 and size >= 1:
        arguments.per_device_eval_batch_size = size
        tried[size] = figures = _evaluate_if_possible(trainer)
        if figures is not None and figures["peak_bytes"] - figures["kept_bytes"] <= most_bytes:
            break
        size //= 2
    arguments.per_device_eval_batch_size = own
    if ranks.number > 1:
        tried[own] = max(ranks.gather(evaluate_longest(trainer)), key=lambda figures: figures["peak_bytes"])
    figures = tried[own]
    found: dict[str, Any] = {"peak_bytes": None, **(figures or {})}
    if size not in (0, own) and (fitting := tried.get(size)) is not None:
        found |= {"fitting_size": size, "fitting_peak_bytes": fitting["peak_bytes"] - fitting["kept_bytes"]}
    elif figures is not None and figures["peak_bytes"] > most_bytes and torch.device(arguments.device).type != "cpu":
        left = most_bytes - figures["peak_bytes"] + figures["kept_bytes"]
        found["fitting_steps"] = 1 + max(0, int(left // max(1, figures["batch_bytes"])))
    found.pop("batch_bytes", None)
    return found


def _evaluate_if_possible(trainer: Any) -> dict[str, float] | None:
    """Return the bytes of an evaluation; None if there is no memory for it."""
    try:
        return evaluate_longest(trainer)
    except Exception as error:  # which kind says that memory is short differs between devices
        if not is_out_of_memory(error):
            raise
    return None


def _epoch(order: Any, lengths: Lengths, batch_size: int) -> Epoch | None:
    """Return the training's order of the samples that were read; None for a sampler that makes whole batches."""
    if not isinstance(order, LengthGroupedSampler):
        return epoch_of(order, lengths)
    number = len(lengths.tokens)
    groups = max(1, min((lengths.number or number) // (4 * batch_size), 50))  # as the library has them

    def grouped(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        found: list[int] = get_length_grouped_indices(order.lengths[:number], batch_size, groups, generator)
        return found

    return grouped


def _measure(
    trainer: Any,
    train: Callable[[], Any],
    optimizer: Any,
    lengths: Lengths,
    ranks: Ranks,
    size: int,
    accumulation: int | None,
) -> dict[str, Any]:
    """Run a few optimizer steps at one size, the longest micro-batch first; `optimizer` is the command's, if any.

    `accumulation` is that of the answer; None if the command has its own in braces.
    """
    from transformers.trainer_callback import TrainerCallback  # noqa: PLC0415 - the command has imported it

    compile_anew()
    arguments = trainer.args
    arguments.per_device_train_batch_size = trainer._train_batch_size = size
    arguments.max_steps = 1 << 30
    if accumulation is not None:
        arguments.gradient_accumulation_steps = min(ACCUMULATION, accumulation)
    trainer.accelerator.gradient_accumulation_steps = arguments.gradient_accumulation_steps
    trainer.optimizer, trainer.lr_scheduler = optimizer, None  # without a given one, each size makes its own
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    trainer._created_lr_scheduler = False
    trainer.accelerator.free_memory()  # now, and not when the clock of the peak runs
    clock = Clock(arguments.device, ranks, WORST_TIMES // min(ACCUMULATION, arguments.gradient_accumulation_steps))
    clock.are_alike = lengths.are_alike
    clock.accumulation_given = arguments.gradient_accumulation_steps
    numbers = itertools.count()

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            clock.end_step()
            control.should_training_stop = control.should_epoch_stop = clock.is_over
            return control

    original, step = trainer._get_train_sampler, trainer.training_step

    def timed(*given: Any, **named: Any) -> Any:
        clock.begin_micro_step()
        positions = positions_of(named["inputs"] if "inputs" in named else given[1])
        loss = step(*given, **named)
        clock.end_micro_step(next(numbers), positions)
        return loss

    def worst_first(*given: Any) -> Any:
        order = original(*given)
        epoch = _epoch(order, lengths, math.prod(arguments.bexp_asked))
        if epoch is None:
            return order
        clock.ran_longest = True
        sampler, clock.micro_batches = order_of(order, epoch, lengths, size, processes=ranks.number, rank=ranks.own)
        return sampler

    steps = Steps()
    trainer.add_callback(steps)
    trainer.training_step = timed
    if lengths.is_known:
        trainer._get_train_sampler = worst_first
    try:
        train()
    finally:
        trainer.remove_callback(steps)
        trainer.training_step, trainer._get_train_sampler = step, original
    return clock.figures()


def describe_evaluation(trainer: Any) -> dict[str, Any] | None:
    """Return the longest batch of an evaluation; None if no dataset can be read in any order."""
    found = _datasets(trainer)
    if not found:
        return None
    return {
        "batch_size": trainer.args.per_device_eval_batch_size,
        "length": max(max(lengths.widths, default=0) for _, lengths in found),
    }


def evaluate_longest(trainer: Any) -> dict[str, float]:
    """Return the bytes of an evaluation's longest batch, while the optimizer has the state that the training left.

    For `compute_metrics` the Trainer keeps the outputs of all batches on the device, which are added to the peak.
    Several datasets are evaluated one by one, and the one with the highest peak is returned. `kept_rows` is the number
    of its rows whose outputs are kept, and `batch_bytes` are those that each batch adds.
    """
    each = (_evaluated(trainer, dataset, lengths) for dataset, lengths in _datasets(trainer))
    return max(each, key=lambda figures: figures["peak_bytes"])


def _evaluated(trainer: Any, dataset: Any, lengths: Lengths) -> dict[str, float]:
    arguments = trainer.args
    number = arguments.per_device_eval_batch_size * arguments.world_size
    places = lengths.longest(number) if lengths.is_known else [place % len(dataset) for place in range(number)]
    model = trainer.model if trainer.model_wrapped is None else trainer.model_wrapped
    loss_only = arguments.prediction_loss_only or trainer.compute_metrics is None
    reset_peak(arguments.device)
    model.eval()
    batch_bytes = 0
    try:
        for inputs in trainer.get_eval_dataloader(Subset(dataset, places)):
            _, logits, labels = trainer.prediction_step(model, inputs, loss_only)
            batch_bytes = max(batch_bytes, _kept_bytes(trainer, logits, labels))
    finally:
        model.train()
    batches = math.ceil(len(dataset) / number)
    kept = batch_bytes * (min(batches, arguments.eval_accumulation_steps or batches) - 1)
    return {
        "peak_bytes": peak_bytes(arguments.device)[0] + kept,
        "kept_bytes": kept,
        "kept_rows": len(dataset) if kept else 0,
        "batch_bytes": batch_bytes,
    }


def _kept_bytes(trainer: Any, logits: Any, labels: Any) -> int:
    """Return the bytes that stay of each batch's outputs, if all are as long;

    concatenating them takes a second copy.
    """
    arguments = trainer.args
    if logits is not None and trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    if getattr(arguments, "batch_eval_metrics", False):  # metrics take each batch, and nothing is kept
        return 0
    copies = 2 if getattr(arguments, "eval_do_concat_batches", True) else 1
    return copies * sum(t.numel() * t.element_size() for t in _tensors((logits, labels))) * int(arguments.world_size)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _datasets(trainer: Any) -> list[tuple[Any, Lengths]]:
    """Return the datasets that can be read in any order, each with the lengths of its samples."""
    found = trainer.eval_dataset
    each = found.values() if isinstance(found, dict) else [found]
    readable = [one for one in each if hasattr(one, "__len__") and hasattr(one, "__getitem__") and len(one)]
    return [(one, Lengths.of(one)) for one in readable]
