"""One forward and one backward of a module, as they happen in the middle of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


class Passes(Protocol):
    """The passes that a timer runs: a forward and, in training, a backward. Each has an untimed preparation.

    `is_chainable` says whether `run_chain` works. A timer calls the four methods in the order in which they stand
    here, and those of backward only if `training` is set.
    """

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
        """Forward through `length` copies of the module in a row, then backward through all of them."""


class MeteredPasses(Protocol):
    """The passes whose memory is measured: a forward that hands over its outputs, and the tensors alive before it."""

    training: bool

    def prepare_forward(self) -> None:
        """Called once before the forward."""

    def release(self) -> None:
        """Free what earlier passes may have left."""

    def existing_tensors(self) -> list[Tensor]:
        """All tensors that are alive before the forward: parameters, buffers, gradients, inputs."""

    def without_recomputation(self) -> AbstractContextManager[None]:
        """Return a context in which the module is not recomputed as a whole. Recomputation inside it stays."""

    def waiting(self) -> AbstractContextManager[None] | None:
        """Return the context in which the host waits for the device in forward, as in training; None if it never does.

        Outside of the context, the host knows already what it would wait for.
        """

    def metered_forward(self) -> list[Tensor]:
        """Run the forward and return its tensors; in training only those that a backward can start from."""


class ModulePasses:
    """Any module with its arguments, ready to run again and again.

    An argument may be a tensor, anything else, or a tuple, list or dictionary of these. Tensors that require grad when
    they are given are the hidden states: what the neighbouring layer has just computed. They are detached, and in
    training they get gradients. The module returns a tensor, or a structure that holds some.

    In training, the gradients of trained parameters exist already and are accumulated into, as in every micro-step but
    the first. Gradients in another dtype than the parameters' are accumulated in tensors of their own, as an
    optimizer with such gradients does. The gradients that come in are random and contiguous; a scalar output is a loss
    and gets none. In eval mode there is only the forward.

    Args:
        module: what is run.
        arguments: its positional arguments.
        keywords: its keyword arguments.
        training: whether there is a backward.
        gradient_dtype: the dtype that gradients are accumulated in; None is each parameter's own.
        chained: the positional argument (an index) or keyword argument (a name) that the module's output can replace;
            None if none can.
        meet: called before each pass, untimed. Processes that communicate within a pass use it to begin together, so
            that no time contains the wait for another process.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
        *,
        training: bool,
        gradient_dtype: torch.dtype | None = None,
        chained: int | str | None = None,
        meet: Callable[[], None] | None = None,
    ) -> None:
        self.module = module
        self.training = training
        self._inputs: list[Tensor] = []
        self._arguments = tree_map_only(Tensor, self._own, arguments)
        self._keywords = tree_map_only(Tensor, self._own, dict(keywords or {}))
        self._chained = chained
        # Modules that wait for other processes are not run in a row: several might fit on one device and not on
        # another, which would leave the others waiting.
        self.is_chainable = chained is not None and meet is None
        self._meet = meet
        self._output: Any = None
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor | None] | None = None
        module.train(training)
        self._main_gradients = _accumulated_gradients(module, gradient_dtype) if training else []

    def existing_tensors(self) -> list[Tensor]:
        """Parameters, buffers and arguments, and the gradients that they have."""
        arguments = (leaf for leaf in tree_leaves((self._arguments, self._keywords)) if isinstance(leaf, Tensor))
        state = [*self.module.parameters(), *self.module.buffers(), *arguments]
        gradients = [tensor.grad for tensor in state if tensor.is_leaf and tensor.grad is not None]
        return [*state, *gradients, *self._main_gradients]

    def without_recomputation(self) -> AbstractContextManager[None]:
        """Return a context without effect: how the module recomputes is not known here."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[None] | None:
        """Return None: no wait of the module is known here."""
        return None

    def prepare_forward(self) -> None:
        """Write the hidden states once more, as the previous layer would just have done."""
        self._output = None
        self._outputs = []
        for x in self._inputs:
            x.grad = None
            with torch.no_grad():
                x.mul_(1.0)
        if self._meet is not None:
            self._meet()

    def release(self) -> None:
        """Free what a pass may have left: the outputs and the incoming gradients."""
        self._output = None
        self._outputs = []
        self._gradients = None

    def forward(self) -> None:
        """Run the module."""
        with torch.set_grad_enabled(self.training):
            self._output = self.module(*self._arguments, **self._keywords)

    def prepare_backward(self) -> None:
        """Write the incoming gradients once more, as the next layer's backward would just have done."""
        self._outputs = _differentiable(self._output)
        self._output = None
        assert self._outputs, "backward follows a forward whose output requires grad"
        if self._gradients is None:
            self._gradients = [_random_gradient(output) for output in self._outputs]
        else:
            for gradient in self._gradients:
                if gradient is not None:
                    gradient.mul_(1.0)
        if self._meet is not None:
            self._meet()

    def backward(self) -> None:
        """Run the backward; the graph is freed."""
        torch.autograd.backward(self._outputs, self._gradients)
        self._outputs = []

    def run_chain(self, length: int) -> None:
        """Feed the module's first output tensor to the module again, which must take it as its `chained` argument."""
        assert self._chained is not None, "an argument that the output can replace"
        self.release()
        arguments, keywords = list(self._arguments), dict(self._keywords)
        x: Tensor | None = None
        with torch.set_grad_enabled(self.training):
            for _ in range(length):
                if x is not None and isinstance(self._chained, int):
                    arguments[self._chained] = x
                elif x is not None:
                    keywords[self._chained] = x
                output = self.module(*arguments, **keywords)
                x = output if isinstance(output, Tensor) else _tensors(output)[0]
        if self.training:
            assert x is not None
            torch.autograd.backward(x, torch.ones_like(x))

    def metered_forward(self) -> list[Tensor]:
        """Run the module; the output belongs to the caller."""
        with torch.set_grad_enabled(self.training):
            output = self.module(*self._arguments, **self._keywords)
        return _differentiable(output) if self.training else _tensors(output)

    def _own(self, tensor: Tensor) -> Tensor:
        """The tensor as this object's own leaf, and among the hidden states if it requires grad."""
        own = tensor.detach()
        if tensor.requires_grad:
            own.requires_grad_(self.training)
            self._inputs.append(own)
        return own


def join_gradients(outputs: list[Tensor]) -> Tensor:
    """Return a scalar whose backward gives each of `outputs` a gradient."""
    scalar: Tensor = _IncomingGradients.apply(*outputs)  # type: ignore[no-untyped-call]  # untyped in torch
    return scalar


class _IncomingGradients(torch.autograd.Function):
    """A stand-in for the rest of the model: its backward allocates the gradients of a layer's outputs.

    The engine then frees each gradient as soon as the layer no longer needs it, as it does within a model.
    """

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        """Return a scalar; only the shapes of the outputs are remembered."""
        ctx.like = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        """Return zeros like the outputs."""
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _differentiable(output: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(output) if tensor.requires_grad]


def _random_gradient(output: Tensor) -> Tensor | None:
    return None if output.dim() == 0 else torch.randn_like(output, memory_format=torch.contiguous_format)


def _accumulated_gradients(module: nn.Module, dtype: torch.dtype | None) -> list[Tensor]:
    """Give each trained parameter a gradient of zeros; returns the gradients that are tensors of their own."""
    main_gradients = []
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if dtype is None or parameter.dtype is dtype:
            parameter.grad = torch.zeros_like(parameter)
        else:
            main = torch.zeros_like(parameter, dtype=dtype)
            main_gradients.append(main)
            parameter.register_post_accumulate_grad_hook(_accumulate_into(main))
    return main_gradients


def _accumulate_into(main: Tensor) -> Callable[[Tensor], None]:
    def accumulate(parameter: Tensor) -> None:
        if parameter.grad is not None:
            main.add_(parameter.grad)
            parameter.grad = None

    return accumulate
