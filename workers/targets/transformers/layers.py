"""One layer of a kind, replayed forward and backward with the arguments that its model gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bexp.workers.targets.transformers.model import BuildSettings
from bexp.workers.targets.transformers.skeleton import LayerCall, hidden_states
from bexp.workers.targets.transformers.trees import copied, map_tensors, tensors_of


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
