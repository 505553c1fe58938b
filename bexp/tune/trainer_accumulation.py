"""The gradients of one batch in transformers' Trainer, by its own training loop up to the first optimizer step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from bexp.measure.left_alone import left_alone
from bexp.tune.agreement import CannotCheckError, Parts, check, divisors
from bexp.tune.agreement_text import AccumulationCheck, Cause
from bexp.tune.gradients import Gradient, steps_of
from bexp.tune.lengths import label_tokens, most_unequal
from bexp.tune.ranks import Ranks
from bexp.tune.switched_off import (
    LOSS_SCALE,
    nothing_random,
    rounded_otherwise,
    without_batch_statistics,
    without_router_loss,
)

MOST_SAMPLES = 64
"""A larger batch of the command is cut to so many samples on each device, because it is run at least four times."""
SMALLER, MOST_SMALLER = 1 / 16, 4
"""In float16 the first scale of the loss is often too large, and is made smaller so many times."""
_OFF = ("model_init", "neftune_noise_alpha")
"""Arguments of the Trainer that are switched off: new weights for each run, and noise."""


class _WholeBatchError(Exception):
    """All micro-batches of the batch have been run, and the optimizer's step would follow."""


class _Fixed(Sampler[int]):
    """Samples once, in a chosen order."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places = places
        self.is_taken = False

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        self.is_taken = True
        return iter(self._places)


class TrainerCheck:
    """The check of one Trainer; `train` is its own `train`. All processes of a training do the same."""

    def __init__(self, trainer: Any, train: Callable[[], Any], ranks: Ranks) -> None:
        self._trainer = trainer
        self._train = train
        self._optimizer = trainer.optimizer
        self._accumulation = trainer.accelerator.gradient_accumulation_steps  # 1: the Trainer divides by itself
        self._ranks = ranks
        self._shares: list[list[int]] = []
        self._swapped: list[list[int]] = []
        self._own: DataLoader[Any] | None = None

    @property
    def num_devices(self) -> int:
        """Number of processes of the training."""
        return self._ranks.number

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to the trial: the check as a document, or why there is none, as `refused`."""
        trainer = self._trainer
        before = {name: getattr(trainer, name, None) for name in ("train_dataset", *_OFF)}
        self._own = None
        steps = trainer.args.gradient_accumulation_steps
        try:
            if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
                raise CannotCheckError("gradients that are spread over devices cannot be compared")  # noqa: TRY301 - caught below
            dataset = trainer.train_dataset
            number, size = sizes_of(
                trainer.args.bexp_asked,
                command.get("batch_size"),
                command.get("micro_batch_size"),
                len(dataset) // self.num_devices if hasattr(dataset, "__len__") else None,
            )
            return asdict(check(self, number, size, self._take_samples(number)))
        except CannotCheckError as error:
            return {"refused": str(error)}
        finally:
            for name, value in before.items():
                setattr(trainer, name, value)
            trainer.args.gradient_accumulation_steps = steps  # a trial may follow
            trainer.model.zero_grad(set_to_none=True)

    def gradient(self, parts: Parts, *, rounds_otherwise: bool = False, is_swapped: bool = False) -> Gradient:
        """Return the gradient after all micro-batches, in the Trainer's own precision."""
        found: list[Gradient] = []
        for _ in range(MOST_SMALLER):
            divisor = self._run(parts, self._swapped if is_swapped else self._shares, rounds_otherwise=rounds_otherwise)
            found.append(Gradient.of(self._trainer.model, divisor))
            scaler = self._trainer.accelerator.scaler
            if found[-1].is_finite or scaler is None:
                break
            scaler.update(scaler.get_scale() * SMALLER)
        return found[-1]

    def steps(self, parts: Parts) -> list[Gradient]:
        """Return the addend of each micro-batch to the gradient, on each device."""
        after: list[Gradient] = []

        def note() -> None:
            after.append(Gradient.of(self._trainer.model, self._divisor(1.0) * self.num_devices))

        self._run(parts, self._shares, note)
        own = steps_of(after)
        if self.num_devices == 1:
            return own
        gathered: list[Any] = [None] * self.num_devices
        dist.all_gather_object(gathered, own)
        return [step for steps in gathered for step in steps]

    def remedies(self) -> Mapping[Cause, Callable[[], AbstractContextManager[None]]]:
        """Return contexts that switch off parts of this model that depend on the whole micro-batch."""
        return remedies(self._trainer.model)

    def _take_samples(self, number: int) -> str | None:
        """Choose the first samples of the data, and make devices and micro-batches as unequal as possible.

        Returns what these samples cannot show.
        """
        trainer, num_devices = self._trainer, self.num_devices
        dataset: Any = trainer.train_dataset
        whole = number * num_devices
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            dataset = trainer.train_dataset = list(islice(dataset, whole))
        if len(dataset) < whole:
            raise CannotCheckError(f"there are only {len(dataset)} samples")
        tokens = [label_tokens(dataset[place]) for place in range(whole)]
        order = most_unequal(tokens)
        self._shares = [order[rank * number : (rank + 1) * number] for rank in range(num_devices)]
        self._swapped = [order[rank::num_devices] for rank in range(num_devices)]
        if len(set(tokens)) > 1 or tokens[0] is None:
            return None
        return f"samples of unequal length: all of these have {tokens[0]} tokens"

    def _run(
        self,
        parts: Parts,
        shares: Sequence[Sequence[int]],
        note: Callable[[], None] | None = None,
        *,
        rounds_otherwise: bool = False,
    ) -> float:
        """Run the micro-batches of one optimizer step; return the divisor of the gradients.

        A Trainer that does not ask for its sampler has a loader of its own, as sentence-transformers' has. Then these
        samples come in a loader of the same data with the same collator.

        `note` is called after each micro-batch. With it, each process keeps its own gradients.
        """
        from transformers.trainer_callback import TrainerCallback  # noqa: PLC0415 - the command has imported it

        trainer, accelerator = self._trainer, self._trainer.accelerator
        order = _Fixed([share[place] for part in parts for share in shares for place in part])
        original, step, backward = trainer._get_train_sampler, trainer.training_step, accelerator.backward
        get_loader = trainer.get_train_dataloader
        done, scaled, loss_scale = 0, 0, LOSS_SCALE if rounds_otherwise else 1.0

        class BeforeStep(TrainerCallback):
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                raise CannotCheckError(f"its loader of data has made {done} micro-batches in place of {len(parts)}")

        def counted(model: Any, *given: Any, **named: Any) -> Any:
            nonlocal done
            if done == 0:
                ends.enter_context(nothing_random(trainer.model))
                if rounds_otherwise:
                    ends.enter_context(rounded_otherwise(trainer.model))
            with nullcontext() if note is None else _keeps_own(model):
                loss = step(model, *given, **named)
            if note is not None:
                note()
            done += 1
            if done == len(parts):
                raise _WholeBatchError
            return loss

        def backward_scaled(loss: Any, **named: Any) -> None:
            nonlocal scaled
            scaled += 1
            backward(loss * loss_scale, **named)

        before_step = BeforeStep()
        self._set(len(parts[0]), len(parts))
        trainer._get_train_sampler = lambda *_: order
        if self._own is not None:
            batches = [[share[place] for place in part] for part in parts for share in shares]
            loader = DataLoader(self._own.dataset, batch_sampler=batches, collate_fn=self._own.collate_fn)
            trainer.get_train_dataloader = lambda: accelerator.prepare(loader)
        trainer.training_step, accelerator.backward = counted, backward_scaled
        trainer.add_callback(before_step)
        seed_everything(int(rounds_otherwise))
        with ExitStack() as ends:
            try:
                self._train()
            except _WholeBatchError:
                pass
            finally:
                trainer.remove_callback(before_step)
                trainer._get_train_sampler, trainer.training_step = original, step
                accelerator.backward = backward
                trainer.get_train_dataloader = get_loader
        if not order.is_taken and self._own is None:
            self._own = self._find_own_loader()
            return self._run(parts, shares, note, rounds_otherwise=rounds_otherwise)
        if done < len(parts):
            raise CannotCheckError("its loader of data does not use the Trainer's order of samples")
        return self._divisor(loss_scale if scaled else 1.0)

    def _find_own_loader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader. Raises CannotCheckError if its samples have no places."""
        loader = self._trainer.get_train_dataloader()
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise CannotCheckError("its loader of data does not use the Trainer's order of samples")
        found: DataLoader[Any] = loader
        return found

    def _set(self, size: int, steps: int) -> None:
        trainer = self._trainer
        arguments = trainer.args
        arguments.per_device_train_batch_size = trainer._train_batch_size = size
        arguments.gradient_accumulation_steps = steps
        arguments.max_steps = 1
        trainer.accelerator.gradient_accumulation_steps = 1 if self._accumulation == 1 else steps
        for name in _OFF:
            setattr(trainer, name, None)
        trainer.optimizer, trainer.lr_scheduler = self._optimizer, None
        trainer._created_lr_scheduler = False

    def _divisor(self, loss_scale: float) -> float:
        scaler = self._trainer.accelerator.scaler
        return loss_scale * (1.0 if scaler is None else float(scaler.get_scale()))


def sizes_of(
    own: tuple[int, int], batch_size: int | None, micro_batch_size: int | None, available: int | None
) -> tuple[int, int]:
    """Return the number of samples to compare on each device, and the micro-batch to accumulate.

    `own` is the command's micro-batch with its accumulation steps, and `available` the number of samples.

    Raises CannotCheckError if the batch cannot be split so.
    """
    size, steps = own
    if micro_batch_size is not None:
        size, steps = micro_batch_size, max(2, -(-own[0] * own[1] // micro_batch_size))
    number = batch_size
    if number is None:
        most = MOST_SAMPLES if available is None else min(MOST_SAMPLES, available)
        number = size * min(steps, max(1, most // size))
        number = number if available is None else min(number, available)
    if available is not None and number > available:
        raise CannotCheckError(f"there are only {available} samples for each device, and a batch has {number}")
    if number < 2:
        raise CannotCheckError("a batch of one sample has nothing to accumulate: --batch-size states a larger one")
    if micro_batch_size is None:
        return number, next(divisor for divisor in divisors(number)[1:] if divisor <= size)
    if micro_batch_size >= number or number % micro_batch_size:
        raise CannotCheckError(f"a batch of {number} cannot be split into micro-batches of {micro_batch_size}")
    return number, micro_batch_size


@contextmanager
def _keeps_own(model: Any) -> Iterator[None]:
    """Keep processes from exchanging gradients in this micro-step, even if it is the last of a batch."""
    if not hasattr(model, "require_backward_grad_sync"):
        yield
        return
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


Sample = TypeVar("Sample")
Loss = Callable[[list[Sample], list[Sample]], torch.Tensor]


def check_accumulation(
    model: nn.Module, loss: Loss[Sample], samples: Sequence[Sample], micro_batch_size: int | None = None
) -> AccumulationCheck:
    """Compare the gradients of one batch as one micro-batch, and in micro-batches of `micro_batch_size`.

    Gradients agree if they differ by at most three times as much as two orders of the same samples do. Dropout and
    noise are off meanwhile. No optimizer steps, and gradients, buffers and random states are afterwards as before.

    Args:
        model: the model, whose trained parameters get gradients.
        loss: `loss(micro_batch, batch)` returns the tensor on which the training loop calls `backward()`: the loss of
            the samples in `micro_batch`, some of those in `batch`, scaled as the loop does when it accumulates `batch`.
            A loop that divides by the number of micro-batches returns `mean_loss * len(micro_batch) / len(batch)`. One
            that divides by all label tokens of the batch counts them in `batch`. The loop's precision belongs into
            `loss`, for example as `torch.autocast`.
        samples: those of one optimizer step, or their places in a data set.
        micro_batch_size: default: half of the samples, or the largest smaller divisor of their number.

    Raises:
        CannotCheckError: a ValueError; the samples cannot be split so, or their gradients are random.
    """
    number = len(samples)
    if number < 2:
        raise CannotCheckError("there is nothing to accumulate: give two samples or more")
    size = divisors(number)[1] if micro_batch_size is None else micro_batch_size
    if not 1 <= size < number or number % size:
        raise CannotCheckError(f"{number} samples cannot be split into micro-batches of {size}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CannotCheckError("the model has no parameters that are trained")
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with left_alone(model.parameters(), model.buffers(), devices), nothing_random(model):
        order = most_unequal([label_tokens(sample) for sample in samples])
        return check(_Loop(model, loss, [samples[place] for place in order]), number, size)


class _Loop:
    """The gradients of a loop of a person's own."""

    num_devices = 1

    def __init__(self, model: nn.Module, loss: Loss[Any], samples: Sequence[Any]) -> None:
        self._model = model
        self._loss = lambda part: loss([samples[place] for place in part], list(samples))

    def gradient(self, parts: Parts, *, rounds_otherwise: bool = False, is_swapped: bool = False) -> Gradient:
        assert not is_swapped, "there is one device"
        loss_scale = LOSS_SCALE if rounds_otherwise else 1.0
        with rounded_otherwise(self._model) if rounds_otherwise else nullcontext():
            for _ in self._run(parts, loss_scale, seed=int(rounds_otherwise)):
                pass
        return Gradient.of(self._model, loss_scale)

    def steps(self, parts: Parts) -> list[Gradient]:
        return steps_of(Gradient.of(self._model) for _ in self._run(parts))

    def remedies(self) -> Mapping[Cause, Callable[[], AbstractContextManager[None]]]:
        return remedies(self._model)

    def _run(self, parts: Parts, loss_scale: float = 1.0, seed: int = 0) -> Iterator[None]:
        """Run all micro-batches, and stop after each."""
        seed_everything(seed)
        self._model.zero_grad(set_to_none=True)
        for part in parts:
            (self._loss(part) * loss_scale).backward()  # type: ignore[no-untyped-call]  # torch
            yield


def remedies(model: nn.Module) -> Mapping[Cause, Callable[[], AbstractContextManager[None]]]:
    """Return contexts that switch off the parts of a model that depend on the whole micro-batch, where it has them."""
    found = {Cause.ROUTER: without_router_loss(model), Cause.BATCH_NORM: without_batch_statistics(model)}
    return {cause: switched_off for cause, switched_off in found.items() if switched_off is not None}


def seed_everything(seed: int) -> None:
    """Let each computation of gradients draw the same random numbers, or others on purpose."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
