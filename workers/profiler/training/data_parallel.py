"""What training together asks of a model and its gradients, and a process that trains by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import nn

from workers.targets.reference.optimizer import TrainingOptimizer

Step = Callable[[], None]


class DataParallel(Protocol):
    """What becomes of a model as it is built, and of its gradients as it is trained.

    Every process has a model with the same parameters, and data of its own. After the last micro-step of a step the
    optimizer has the mean of their gradients, or this process's share of it.
    """

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """A layer, an embedding or a head has been built: the last one that comes in forward, or another."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """What is to be called in place of the finished model."""

    def prepare(self, optimizer: TrainingOptimizer, micro_step: Step) -> None:
        """Bring memory and order of exchange to where they stay; `micro_step` runs one, which may leave gradients."""

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around the forward and the backward of one of a step's micro-steps."""

    def finish(self) -> None:
        """Let go of what outlives the model, when the device has come to the end of everything."""


class Alone:
    """One process, which exchanges nothing; a model in eval mode."""

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """It stays as it is."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model."""
        return model

    def prepare(self, optimizer: TrainingOptimizer, micro_step: Step) -> None:
        """There is nothing to prepare."""

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Nothing happens around it."""
        return nullcontext()

    def finish(self) -> None:
        """There is nothing."""
