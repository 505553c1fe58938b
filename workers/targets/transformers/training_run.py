"""A whole transformers model that trains as its library's Trainer does."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from bexp.measure.timestamps import Mark, mark_of
from workers.targets.transformers.model import BuildSettings

MICRO_STEPS = 2
MAX_GRADIENT_NORM = 1.0
"""TrainingArguments.max_grad_norm's default."""


class TrainerOptimizer:
    """The Trainer's default: gradients are clipped by their norm, then fused AdamW (or SGD) steps.

    States have the format of the parameters, and there are no master weights. Gradients are dropped after each step,
    unless `keeps_gradients`: then they wait to be filled anew.
    """

    def __init__(self, parameters: list[nn.Parameter], name: str, *, keeps_gradients: bool = False) -> None:
        self._parameters = parameters
        self._keeps_gradients = keeps_gradients
        fused = all(p.is_cuda or p.device.type == "cpu" for p in parameters)
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, fused=fused)
            if name == "adamw"
            else torch.optim.SGD(parameters, momentum=0.9, fused=fused)
        )

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients, in the parameters' order."""
        return [parameter.grad for parameter in self._parameters]

    def step(self) -> None:
        """Clip, and update the parameters."""
        nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients, unless they are kept."""
        if not self._keeps_gradients:
            self._optimizer.zero_grad()


class TransformersTrainingRun:
    """Micro-steps of one model, with accumulated gradients, then the optimizer. Eval mode has forwards alone."""

    exchanges = False

    def __init__(
        self,
        model: Any,
        batches: list[dict[str, Tensor]],
        optimizer: TrainerOptimizer | None,
        build: BuildSettings,
        device: torch.device,
    ) -> None:
        self._model = model
        self._batches = batches
        self._optimizer = optimizer
        self._build = build
        self._device = device
        self._mark = mark_of(device)

    def begin(self) -> float:
        """Run a step of one micro-step; returns what a whole step would take by it, in seconds."""
        self._synchronize()
        started = time.perf_counter()
        self._micro_step(0)
        self._synchronize()
        seconds = time.perf_counter() - started
        self._update()
        return seconds * len(self._batches)

    def step(self) -> list[Mark]:
        """One step; returns the moments before each micro-step, before the optimizer, and after it."""
        marks = [self._mark()]
        for number in range(len(self._batches)):
            self._micro_step(number)
            marks.append(self._mark())
        self._update()
        return [*marks, self._mark()]

    def finish(self) -> None:
        """Wait for the device."""
        self._synchronize()

    def _micro_step(self, number: int) -> None:
        training = self._optimizer is not None
        with torch.set_grad_enabled(training), self._build.autocast(self._device):
            loss = self._model(**self._batches[number]).loss
        if training:
            (loss / len(self._batches)).backward()

    def _update(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
