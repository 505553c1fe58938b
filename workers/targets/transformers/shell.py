"""Everything but the layers: embedding, norm, head and loss as the library computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bexp.workers.targets.transformers.skeleton import Skeleton, hidden_states, passed_through
from bexp.workers.targets.transformers.trees import map_tensors, tensors_of


class Bridge(torch.autograd.Function):
    """A stand-in for a layer, with known outputs forward, and known gradients (or the incoming one) backward."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Sequence[Tensor | None] | None, outputs: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return `outputs` as new tensors."""
        ctx.gradients = gradients
        ctx.shapes = [tensor.shape for tensor in inputs]
        return tuple(tensor.view_as(tensor) for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        """Return the gradients that were given, else for each input the first incoming gradient of its shape."""
        if ctx.gradients is not None:
            return None, None, *ctx.gradients
        gradients = [
            next((grad for grad in incoming if grad is not None and grad.shape == shape), None) for shape in ctx.shapes
        ]
        return None, None, *gradients


@dataclass(frozen=True)
class LayerStandIn:
    """The replacement of a layer when the shell is compared with the whole model."""

    output: Any
    """The layer's true output."""
    gradients: tuple[Tensor | None, ...]
    """The true gradient, or None, of each floating-point tensor among its arguments."""


class ShellPart:
    """The model with its layers taken out, for one micro-batch.

    Each layer hands its hidden states on. The last one gives the hidden states of a real layer's output, so that head
    and loss work on values like the model's. The backward pass goes through the head, and then through the embedding if
    that is trained.
    """

    def __init__(self, skeleton: Skeleton, batch: Mapping[str, Tensor]) -> None:
        self.skeleton = skeleton
        self.batch = dict(batch)
        self._outputs = skeleton.outputs(batch)
        self._last_output = self._outputs[skeleton.representatives[-1]]

    @property
    def model(self) -> Any:
        """The model that the shell is made of; only its parameters outside the layers get gradients."""
        return self.skeleton.model

    def forward(self) -> Tensor:
        """Return the loss, a scalar."""
        return self._run(self._step_aside).loss  # type: ignore[no-any-return]  # an output class of the library

    def forward_with(self, stand_ins: Sequence[LayerStandIn]) -> Any:
        """Return the model's output with each layer replaced by its stand-in."""

        def handle(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()]
            return bridged(stand_ins[index].output, inputs, stand_ins[index].gradients)

        return self._run(handle)

    def clear_gradients(self) -> None:
        """Drop the gradients of the model's parameters."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def _run(self, handle: Any) -> Any:
        with self.skeleton.stubbed(handle):
            return self.skeleton.run(self.batch)

    def _step_aside(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_states(args, kwargs)
        if index < len(self.skeleton.layers) - 1:
            return passed_through(self._outputs[self.skeleton.representatives[index]], hidden)
        return bridged(self._last_output, [hidden], None)


def bridged(output: Any, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None] | None) -> Any:
    """Return `output` with its floating-point tensors computed from `inputs`, as autograd sees it."""
    floating = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in inputs):
        # The embedding is frozen, but the layers are trained, so their outputs need a gradient all the same.
        inputs = [*inputs, torch.empty(0, requires_grad=True)]
        gradients = None if gradients is None else [*gradients, None]
    made = iter(Bridge.apply(gradients, floating, *inputs))  # type: ignore[no-untyped-call]  # untyped in torch
    return map_tensors(output, lambda tensor: next(made) if tensor.is_floating_point() else tensor)
