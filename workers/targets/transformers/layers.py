"""One layer of a kind, replayed with the arguments that its model gives it, and all of the model but its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bexp.workers.targets.transformers.model import BuildSettings
from bexp.workers.targets.transformers.skeleton import (
    LayerCall,
    Skeleton,
    copied,
    hidden_states,
    map_tensors,
    passed_through,
    tensors_of,
)


class BuiltLayer:
    """A layer alone on its device, with the arguments of one micro-batch.

    Attributes:
        module: the layer with real weights, in training or eval mode as the settings say.
        hidden: its hidden states in, a leaf that requires grad in training.
        inputs: every argument that gets a gradient, `hidden` among them.
    """

    def __init__(
        self, module: nn.Module, call: LayerCall, settings: BuildSettings, followed_outputs: Sequence[int] | None = None
    ) -> None:
        self.module = module
        self._followed = followed_outputs
        self.settings = settings
        self.device = call.hidden.device
        given = id(call.hidden)

        def leaf(tensor: Tensor) -> Tensor:
            wanted = settings.training and (tensor.requires_grad or id(tensor) == given)
            return copied(tensor.detach()).requires_grad_(wanted)

        self.args, self.kwargs = map_tensors((call.args, call.kwargs), leaf)
        self.hidden = hidden_states(self.args, self.kwargs)
        self.inputs = tuple(tensor for tensor in tensors_of((self.args, self.kwargs)) if tensor.requires_grad)
        self._gradients: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[Tensor, ...]:
        """Run the layer; return the outputs that the rest of the model uses, the hidden states first."""
        return self.followed(self.forward_all())

    def forward_all(self) -> Any:
        """Run the layer; return its whole output."""
        with torch.set_grad_enabled(self.settings.training), self.settings.autocast(self.device):
            return self.module(*self.args, **self.kwargs)

    def followed(self, output: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a layer's output that the rest of the model uses.

        The self-check knows their places; else they are those with the shape of the hidden states.
        """
        floating = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
        if self._followed:
            return tuple(floating[place] for place in self._followed)
        alike = [tensor for tensor in floating if tensor.shape == self.hidden.shape]
        return tuple(alike or [tensor for tensor in floating if tensor.requires_grad] or floating)

    def backward(self, outputs: tuple[Tensor, ...]) -> None:
        """Add to the gradients of inputs and parameters; the incoming gradient is random and made once."""
        taken = tuple(tensor for tensor in outputs if tensor.requires_grad)
        if len(self._gradients) != len(taken):
            self._gradients = tuple(torch.randn_like(tensor) for tensor in taken)
        torch.autograd.backward(taken, self._gradients)

    def clear_gradients(self) -> None:
        """Drop the gradients of inputs and parameters."""
        for tensor in [*self.inputs, *self.module.parameters()]:
            tensor.grad = None


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
