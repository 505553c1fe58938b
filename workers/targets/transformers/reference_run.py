"""A whole model's forward and backward pass, with everything that crosses the border of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bexp.workers.targets.transformers.config import quiet_library
from bexp.workers.targets.transformers.shell import LayerStandIn
from bexp.workers.targets.transformers.skeleton import LayerCall
from bexp.workers.targets.transformers.trees import copied, map_tensors, tensors_of


class _Gate(torch.autograd.Function):
    """A copy that separates the gradients on the two sides of a layer's border."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass
class LayerRecord:
    """A layer's call and its output, with the floating-point tensors that crossed its border."""

    call: LayerCall
    output: Any
    inputs: list[Tensor]
    outputs: list[Tensor]

    @property
    def input_gradients(self) -> tuple[Tensor | None, ...]:
        """A gradient, or None, for each floating-point argument."""
        return tuple(_gradient(tensor) for tensor in self.inputs)

    @property
    def output_gradients(self) -> tuple[Tensor | None, ...]:
        """A gradient, or None, for each floating-point output."""
        return tuple(_gradient(tensor) for tensor in self.outputs)

    def stand_in(self) -> LayerStandIn:
        """Return the replacement of this layer in the shell."""
        return LayerStandIn(self.output, self.input_gradients)


@dataclass
class ReferenceRun:
    """The result of one whole forward and backward pass."""

    loss: Tensor
    logits: Tensor
    records: dict[int, LayerRecord]
    num_calls: list[int]
    """How often each layer was called."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Copies, by the parameter's id."""


def run_reference(model: Any, layers: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> ReferenceRun:
    """Run `model` forward and backward on `batch`, record every layer's border, and clear the gradients."""
    records: dict[int, LayerRecord] = {}
    num_calls = [0] * len(layers)

    def wrapped(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            num_calls[index] += 1
            kept_args, kept_kwargs = map_tensors((args, kwargs), copied)
            args, kwargs = map_tensors((args, kwargs), _gated)
            inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()]
            output = original(*args, **kwargs)
            kept_output = map_tensors(output, lambda tensor: copied(tensor).detach())
            output = map_tensors(output, _gated)
            outputs = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
            records[index] = LayerRecord(LayerCall(kept_args, kept_kwargs), kept_output, inputs, outputs)
            return output

        return forward

    try:
        for index, layer in enumerate(layers):
            layer.forward = wrapped(index, layer.forward)
        with quiet_library():
            out = model(**batch, use_cache=False)
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
    out.loss.backward()
    return ReferenceRun(out.loss.detach(), out.logits.detach(), records, num_calls, taken_gradients(model))


def run_plain(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the loss of `model` on `batch`, and its gradients by parameter id, which are then cleared."""
    with quiet_library():
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), taken_gradients(model)


def taken_gradients(module: nn.Module) -> dict[int, Tensor]:
    """Take the gradients of a module's parameters away, and return them by the parameter's id."""
    gradients = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            gradients[id(parameter)] = parameter.grad
            parameter.grad = None
    return gradients


def _gated(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    gated: Tensor = _Gate.apply(tensor)  # type: ignore[no-untyped-call]  # untyped in torch
    gated.retain_grad()
    return gated


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.requires_grad else None
