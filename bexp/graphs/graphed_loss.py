"""A training micro-step as two CUDA graphs: a forward and a backward, each launched as one.

The host then issues two launches where it issued thousands, which is what limits small micro-batches. The graphs are
replayed from inside somebody's own loop: `loss = model(...)` replays the forward, `(loss / n).backward()` replays the
backward. Accumulation, clipping and the optimizer stay outside, and see the gradients where they always are.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.graphs.recorder import CudaRecorder, NotCapturableError, Recorder, describe_error
from bexp.graphs.training_state import TrainingState

_LOGGER = logging.getLogger(__name__)
MAX_SIGNATURES = 4
"""Shapes of inputs that have graphs. Each of them takes a warm-up and a capture, about four steps' time."""
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)

Signature = tuple[Any, ...]


class GraphedLoss:
    """A function that returns a loss, replayed as CUDA graphs where that is possible, else called as it is.

    The graphs read and write fixed memory: inputs are copied in, and backward adds to gradients in place. There is one
    pair of graphs for each signature: shapes and formats of tensors, values of other arguments, autocast.

    A call runs as it is without gradients, in eval mode, and beyond `MAX_SIGNATURES`. It also does while the backward
    of an earlier loss is still to come, and after a capture has failed; `problem` then says why.

    Python code runs when it is captured, and not when it is replayed. So the function may not read values of tensors.

    Args:
        module: the model, whose trained parameters get gradients. They may be set to None between steps.
        function: called with the inputs; returns the loss, a tensor of one element.
        within: a context for each warm-up and capture with these inputs.
        recorder: makes the graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Tensor],
        *,
        within: Callable[[dict[str, Any]], AbstractContextManager[Any]] = lambda _: nullcontext(),
        recorder: Recorder | None = None,
    ) -> None:
        self.problem: str | None = None
        self.error: Exception | None = None
        self._module = module
        self._function = function
        self._within = within
        self._recorder = recorder or CudaRecorder()
        self._state: TrainingState | None = None
        self._steps: dict[Signature, _GraphedStep] = {}
        self._pending: weakref.ref[_Ticket] | None = None
        self._warned: set[str] = set()

    @property
    def num_captures(self) -> int:
        """Number of signatures that have graphs."""
        return len(self._steps)

    @property
    def always_replays(self) -> bool:
        """Whether there are graphs, and no call that trains had to run as it is so far."""
        return bool(self._steps) and self.problem is None and not self._warned

    @property
    def held_bytes(self) -> int:
        """Memory that the graphs keep for their activations. torch's count of allocated bytes leaves it out."""
        return self._recorder.pool_bytes if self._steps else 0

    def __call__(self, **inputs: Any) -> Tensor:
        """Return the loss of `inputs`, in memory of its own, which no replay overwrites."""
        step = self._step(inputs)
        if step is None:
            return self._function(**inputs)
        step.copy_in(inputs)
        ticket = _Ticket()
        self._pending = weakref.ref(ticket)
        loss: Tensor = _Replay.apply(step.anchor, step, ticket)  # type: ignore[no-untyped-call]  # untyped in torch
        return loss

    def reset(self) -> None:
        """Drop all graphs with their memory."""
        self._steps.clear()
        self._state = None

    def _step(self, inputs: dict[str, Any]) -> _GraphedStep | None:
        """Return the graphs for `inputs`, captured now if need be; None if the call runs as it is."""
        if self.problem is not None or not (torch.is_grad_enabled() and self._module.training):
            return None
        if torch.compiler.is_compiling():
            return None
        if (ticket := self._pending() if self._pending else None) is not None and not ticket.done:
            self._warn("the backward of an earlier loss is still to come, and its graph cannot run twice before it")
            return None
        try:
            signature = _signature_of(inputs)
        except NotCapturableError as error:
            self._warn(str(error))
            return None
        if self._state is not None and not self._state.holds():
            _LOGGER.info("the model's parameters, buffers or parts are others now: the micro-step is captured again")
            self.reset()
        if signature not in self._steps:
            if len(self._steps) >= MAX_SIGNATURES:
                self._warn(f"there are graphs for {MAX_SIGNATURES} shapes of inputs already")
                return None
            return self._capture(signature, inputs)
        return self._steps[signature]

    def _capture(self, signature: Signature, inputs: dict[str, Any]) -> _GraphedStep | None:
        try:
            if self._state is None:
                self._state = TrainingState.of(self._module, self._recorder)
            with self._state.on_its_device(), self._within(inputs):
                self._steps[signature] = _GraphedStep(self._function, inputs, self._state, self._recorder)
        except (NotCapturableError, torch.OutOfMemoryError) as error:
            self.problem = str(error) if isinstance(error, NotCapturableError) else describe_error(error)
            error.__cause__ = error.__context__ = None  # their frames hold what the attempt computed
            self.error = error.with_traceback(None)
            self.reset()
            _LOGGER.warning(
                "the micro-step is not replayed as CUDA graphs, and runs operation by operation: %s", self.problem
            )
            return None
        return self._steps[signature]

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            _LOGGER.warning("a micro-step runs operation by operation, not as CUDA graphs: %s", reason)


class _GraphedStep:
    """Forward and backward of one signature, captured when it is built."""

    def __init__(
        self, function: Callable[..., Tensor], inputs: dict[str, Any], state: TrainingState, recorder: Recorder
    ) -> None:
        self._function = function
        self._state = state
        self._inputs = {
            name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        self._tensors = [(name, value) for name, value in self._inputs.items() if isinstance(value, Tensor)]
        self._loss: Tensor | None = None
        self._incoming: Tensor | None = None
        with torch.enable_grad(), _no_autocast_cache(), state.borrowed() as self._reached:
            recorder.warm_up(self._warm_up)
            self._forward_again, self._backward_again = recorder.record((self._forward, self._backward))
            if self._loss is not None:
                self._loss = self._loss.detach()  # the graphs keep the tensors that backward needs
        assert self._incoming is not None, "the warm-up ran a backward"
        self.anchor: Tensor = torch.zeros((), device=self._incoming.device, requires_grad=True)

    def copy_in(self, inputs: dict[str, Any]) -> None:
        """Write the inputs of a micro-step where the graphs read them."""
        for name, fixed in self._tensors:
            fixed.copy_(inputs[name], non_blocking=True)

    def forward(self) -> Tensor:
        """Replay the forward; returns the loss."""
        self._forward_again()
        assert self._loss is not None, "the forward leaves a loss"
        return self._loss.detach().clone()

    def backward(self, incoming: Tensor) -> None:
        """Replay the backward, which adds to the gradients."""
        assert self._incoming is not None, "the warm-up ran a backward"
        self._state.attach(self._reached)
        self._incoming.copy_(incoming)
        self._backward_again()

    def _warm_up(self) -> None:
        self._forward()
        assert self._loss is not None, "the forward leaves a loss"
        if self._incoming is None:
            self._incoming = torch.zeros_like(self._loss)  # so that nothing is added to gradients
        self._backward()
        self._loss = None

    def _forward(self) -> None:
        self._loss = self._function(**self._inputs)
        if self._loss.numel() != 1 or not self._loss.requires_grad:
            raise NotCapturableError("the loss is no differentiable tensor of one element")

    def _backward(self) -> None:
        assert self._loss is not None, "backward follows forward"
        torch.autograd.backward(self._loss, self._incoming)


class _Ticket:
    """A forward whose backward is to come. The loss keeps the ticket alive."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False


class _Replay(Function):
    """The captured micro-step as a node of the trainer's own autograd graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, step: _GraphedStep, ticket: _Ticket) -> Tensor:
        """Replay the forward."""
        ctx.step, ctx.ticket = step, ticket
        return step.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[None, None, None]:
        """Replay the backward, once."""
        if ctx.ticket.done:
            raise RuntimeError("backward a second time through a micro-step that is replayed as CUDA graphs")
        ctx.ticket.done = True
        ctx.step.backward(incoming)
        return None, None, None


def _signature_of(inputs: dict[str, Any]) -> Signature:
    signature: list[Any] = [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")]
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise NotCapturableError(f"the input '{name}' asks for its gradient")
            signature.append((name, value.shape, value.dtype, value.device))
        elif isinstance(value, _CONSTANTS):
            signature.append((name, type(value), value))
        else:
            raise NotCapturableError(f"the input '{name}' is a {type(value).__name__}")
    return tuple(signature)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Let autocast copy weights within the graph itself, because weights change between replays."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
