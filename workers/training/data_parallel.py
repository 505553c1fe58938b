"""The interface of data parallelism, and its implementation for a process that trains alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

Step = Callable[[], None]

MICRO_STEPS = 2
DATA_PARALLEL_MICRO_STEPS = 3
"""The kinds of micro-steps: the first, the last, and one in between, which represents all others."""


class Stepped(Protocol):
    """An optimizer, as the all-reduce of gradients sees it."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the optimizer steps."""

    @property
    def gradients(self) -> Sequence[Tensor | None]:
        """The gradients that the optimizer reads, one for each parameter."""


@runtime_checkable
class SpreadBlock(Protocol):
    """A block some of whose parameters are spread over ranks, so that each rank has others."""

    @property
    def spread_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that other ranks do not have; none if every rank has the same."""


def spread_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a module's blocks that other ranks do not have."""
    blocks = (each for each in module.modules() if isinstance(each, SpreadBlock))
    return {parameter for block in blocks for parameter in block.spread_parameters}


class DataParallel(Protocol):
    """A way to train together: changes to a model as it is built, and to its gradients as it is trained.

    All processes have the same parameters and different data. After the last micro-step of a step, the optimizer has
    the mean of their gradients, or this process's share of that mean.
    """

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """Treat a layer, an embedding or a head that was just built. `is_last`: forward runs it last."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in place of the finished model."""

    def prepare(self, optimizer: Stepped, micro_step: Step) -> None:
        """Bring memory and the order of communication to their steady state.

        `micro_step` runs a micro-step, and may leave gradients.
        """

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and the backward of one micro-step of a step."""

    def finish(self) -> None:
        """Free memory that outlives the model, after all work of the device has ended."""


class SingleProcess:
    """One process that communicates nothing, or a model in eval mode."""

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """Leave the unit as it is."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model

    def prepare(self, optimizer: Stepped, micro_step: Step) -> None:
        """Do nothing."""

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def finish(self) -> None:
        """Do nothing."""
