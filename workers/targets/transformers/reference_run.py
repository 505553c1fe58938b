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
    """A copy, so that gradients on the two sides of a layer's border are told apart."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass
class LayerRecord:
    """What crossed a layer's border: its call and its output, and the floating-point tensors in and out."""

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
        """What replaces this layer in the shell."""
        return LayerStandIn(self.output, self.input_gradients)


@dataclass
class ReferenceRun:
    """The result of one whole forward and backward pass.

    num_calls: how often each layer was called
    gradients: by the parameter's id, copies
    """

    loss: Tensor
    logits: Tensor
    records: dict[int, LayerRecord]
    num_calls: list[int]
    gradients: dict[int, Tensor] = field(default_factory=dict)


def run_reference(model: Any, layers: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> ReferenceRun:
    """Runs `model` forward and backward on `batch` and records every layer's border; gradients are cleared after."""
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
    """The loss of `model` on `batch`, and its gradients by parameter id. Its gradients are cleared after."""
    with quiet_library():
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), taken_gradients(model)


def taken_gradients(module: nn.Module) -> dict[int, Tensor]:
    """The gradients of a module's parameters by the parameter's id, taken away from them."""
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
