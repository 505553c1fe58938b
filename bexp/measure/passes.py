"""One forward and one backward of a block, as they happen in the middle of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from explorer.cost_model.components import BlockRecompute
from workers.targets.reference.block import ResidualBlock


class Passes(Protocol):
    """What a timer runs: a forward and, in training, a backward, each with its untimed preparation."""

    training: bool
    is_chainable: bool

    def prepare_forward(self) -> None:
        """Untimed."""

    def forward(self) -> None:
        """Timed."""

    def prepare_backward(self) -> None:
        """Untimed."""

    def backward(self) -> None:
        """Timed."""

    def run_chain(self, length: int) -> None:
        """Forward through `length` of the block in a row, and backward through all of them."""


class BlockPasses:
    """A block with its inputs, ready to run again and again.

    In training, floating-point inputs require gradients, parameter gradients exist already and are accumulated into
    (as in every micro-step but the first), and the gradient that comes in is random and contiguous. Gradients in a
    format other than the parameters' are accumulated in tensors of their own, as `TrainingOptimizer` does it. A block
    whose output is a scalar is a loss. In eval mode there is only the forward.

    A block that communicates has a `meet`, which each pass is preceded by, so that no process's time contains that it
    had to wait for another to begin. Such blocks are not run in a row: several might fit on one device and not on
    another, which would leave the others waiting.
    """

    def __init__(
        self,
        block: nn.Module,
        inputs: tuple[Tensor, ...],
        *,
        training: bool,
        gradient_dtype: torch.dtype,
        meet: Callable[[], None] | None = None,
    ) -> None:
        self.block = block
        self.training = training
        self._inputs = tuple(x.detach().requires_grad_(training) if x.is_floating_point() else x for x in inputs)
        self._output: Tensor | None = None
        self._gradient: Tensor | None = None
        self.is_chainable = isinstance(block, ResidualBlock) and meet is None
        self._meet = meet
        block.train(training)
        self._main_gradients: list[Tensor] = []
        for parameter in block.parameters() if training else ():
            if parameter.dtype is gradient_dtype:
                parameter.grad = torch.zeros_like(parameter)
            else:
                main = torch.zeros_like(parameter, dtype=gradient_dtype)
                self._main_gradients.append(main)
                parameter.register_post_accumulate_grad_hook(_accumulate_into(main))

    def existing_tensors(self) -> list[Tensor]:
        """What is alive before the forward."""
        state = [*self.block.parameters(), *self.block.buffers(), *self._inputs]
        gradients = [p.grad for p in state if p.grad is not None]
        return [*state, *gradients, *self._main_gradients]

    def prepare_forward(self) -> None:
        """Leave the inputs where the previous block's output would be: just written."""
        self._output = None
        for x in self._inputs:
            if x.is_floating_point():
                x.grad = None
                with torch.no_grad():
                    x.mul_(1.0)
        if self._meet is not None:
            self._meet()

    def release(self) -> None:
        """Free what a pass may have left: the output and the incoming gradient."""
        self._output = None
        self._gradient = None

    def forward(self) -> None:
        """Run the block."""
        with torch.set_grad_enabled(self.training):
            self._output = self.block(*self._inputs)

    def prepare_backward(self) -> None:
        """Leave the incoming gradient where the next block's backward would have it: just written."""
        assert self._output is not None
        if self._output.dim() > 0:
            if self._gradient is None:
                self._gradient = torch.randn_like(self._output, memory_format=torch.contiguous_format)
            else:
                self._gradient.mul_(1.0)
        if self._meet is not None:
            self._meet()

    def backward(self) -> None:
        """Run the backward; the graph is freed."""
        assert self._output is not None
        torch.autograd.backward(self._output, self._gradient)
        self._output = None

    def run_chain(self, length: int) -> None:
        """Feed the block's output to the block again; only a block whose output is shaped like its input can."""
        self.release()
        (x,) = self._inputs
        with torch.set_grad_enabled(self.training):
            for _ in range(length):
                x = self.block(x)
        if self.training:
            torch.autograd.backward(x, torch.ones_like(x))

    def metered_forward(self) -> Tensor:
        """The forward's output, joined to a gradient that comes into being in backward only."""
        with torch.set_grad_enabled(self.training):
            return self.block(*self._inputs)  # type: ignore[no-any-return]  # modules return anything


@contextmanager
def not_recomputed(block: nn.Module) -> Iterator[None]:
    """The block without recomputation of the whole of it; its tiles and its single operations keep theirs."""
    whole = isinstance(block, ResidualBlock) and block.recompute is BlockRecompute.FULL
    if isinstance(block, ResidualBlock) and whole:
        block.recompute = BlockRecompute.NONE
    try:
        yield
    finally:
        if isinstance(block, ResidualBlock) and whole:
            block.recompute = BlockRecompute.FULL


def _accumulate_into(main: Tensor) -> Callable[[Tensor], None]:
    def accumulate(parameter: Tensor) -> None:
        if parameter.grad is not None:
            main.add_(parameter.grad)
            parameter.grad = None

    return accumulate


def join_gradient(output: Tensor) -> Tensor:
    """A scalar whose backward gives `output` a gradient."""
    scalar: Tensor = _IncomingGradient.apply(output)  # type: ignore[no-untyped-call]  # untyped in torch
    return scalar


class _IncomingGradient(torch.autograd.Function):
    """Stands for the rest of the model: its backward allocates the gradient of a block's output.

    The engine then frees that gradient as soon as the block no longer needs it, as it does within a model.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        """A scalar; only the shape of `output` is remembered."""
        ctx.like = (output.shape, output.dtype, output.device)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        """Zeros like the output."""
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)
