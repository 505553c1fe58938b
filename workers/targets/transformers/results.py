"""The results of a layer or the shell, and the check whether settings change them by more than rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bexp.workers.targets.transformers.comparison import DifferenceError
from bexp.workers.targets.transformers.layers import BuiltLayer
from bexp.workers.targets.transformers.shell import ShellPart

ROUNDING = 8 * torch.finfo(torch.bfloat16).eps
"""How far off a result may be, relative to its norm. Kernels round to bfloat16 at other places than the library."""
MOVED_TOKENS = 4
"""How many times as far it may be off where rounding may send a token to another expert."""


def results_of(part: BuiltLayer) -> dict[str, Tensor]:
    """Return a layer's outputs and, in training, the gradients of its inputs and parameters."""
    outputs = part.forward()
    results = {f"output {place}": tensor.detach().clone() for place, tensor in enumerate(outputs)}
    if part.settings.training:
        part.clear_gradients()
        part.backward(outputs)
        inputs = ((f"input {place}", tensor) for place, tensor in enumerate(part.inputs))
        for name, tensor in (*inputs, *part.module.named_parameters()):
            if tensor.grad is not None:
                results[f"gradient of {name}"] = tensor.grad.clone()
        part.clear_gradients()
    return results


def results_of_shell(part: ShellPart) -> dict[str, Tensor]:
    """Return the loss and, in training, the gradients of the parameters outside the layers."""
    training = part.skeleton.settings.training
    part.clear_gradients()
    with torch.set_grad_enabled(training):
        loss = part.forward()
    results = {"loss": loss.detach().clone()}
    if training:
        loss.backward()
        gradients = ((name, tensor.grad) for name, tensor in part.model.named_parameters())
        results |= {f"gradient of {name}": grad.clone() for name, grad in gradients if grad is not None}
        part.clear_gradients()
    return results


def require_alike(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, moves_tokens: bool) -> None:
    """Raise DifferenceError for the first result that is missing, or off by more than rounding."""
    limit = ROUNDING * (MOVED_TOKENS if moves_tokens else 1)
    for name, tensor in expected.items():
        if name not in actual:
            raise DifferenceError(f"{name}: there is none with these kernels")
        error = float((actual[name].float() - tensor.float()).norm())
        scale = float(tensor.float().norm())
        if not error <= limit * scale:
            raise DifferenceError(f"{name}: off by {error:.2g} with these kernels, where its norm is {scale:.2g}")
