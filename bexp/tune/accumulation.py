"""Checks in a loop of a person's own that accumulation leaves the gradients as they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from bexp.tune.agreement import CannotCheckError, Parts, check, divisors
from bexp.tune.agreement_text import AccumulationCheck, Cause
from bexp.tune.gradients import Gradient, steps_of
from bexp.tune.label_tokens import label_tokens, most_unequal
from bexp.tune.rounding import LOSS_SCALE, rounded_otherwise
from bexp.tune.switched_off import nothing_random, without_batch_statistics, without_router_loss

Sample = TypeVar("Sample")
Loss = Callable[[list[Sample], list[Sample]], torch.Tensor]


def check_accumulation(
    model: nn.Module, loss: Loss[Sample], samples: Sequence[Sample], micro_batch_size: int | None = None
) -> AccumulationCheck:
    """Compare the gradients of one batch as one micro-batch, and in micro-batches of `micro_batch_size`.

    `samples` are those of one optimizer step, or their places in a data set. `loss(micro_batch, batch)` returns what
    the training loop calls `backward()` on: the loss of the samples in `micro_batch`, which are some of those in
    `batch`, scaled as the loop does it if it accumulates `batch`. A loop that divides by the number of micro-batches
    returns `mean_loss * len(micro_batch) / len(batch)`. One that divides by all label tokens of the batch counts them
    in `batch`. The loop's precision belongs into `loss`, as `torch.autocast` for example.

    Gradients agree if they differ by at most three times what two orders of the same samples differ by. Dropout and
    noise are off meanwhile. Gradients, buffers and random states are afterwards as they were, and no optimizer steps.
    `micro_batch_size` is half of the samples, or the largest smaller divisor of their number, if it is not given.

    Raises CannotCheckError, a ValueError, if the samples cannot be split so, or if their gradients are random.
    """
    number = len(samples)
    if number < 2:
        raise CannotCheckError("there is nothing to accumulate: give two samples or more")
    size = divisors(number)[1] if micro_batch_size is None else micro_batch_size
    if not 1 <= size < number or number % size:
        raise CannotCheckError(f"{number} samples cannot be split into micro-batches of {size}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise CannotCheckError("the model has no parameters that are trained")
    with _left_alone(model), nothing_random(model):
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
    """What switches off the parts of a model that depend on the whole micro-batch, where it has them."""
    found = {Cause.ROUTER: without_router_loss(model), Cause.BATCH_NORM: without_batch_statistics(model)}
    return {cause: switched_off for cause, switched_off in found.items() if switched_off is not None}


def seed_everything(seed: int) -> None:
    """Have each computation of gradients draw the same numbers, or others on purpose."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Save gradients, buffers and random states, and restore them at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    on_devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        for device, state in on_devices:
            torch.cuda.set_rng_state(state, device)
