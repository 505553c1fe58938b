"""The results of a layer or the shell, and comparisons of tensors that may differ by rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bexp.explorer.model.parts import Float8Layers
from bexp.explorer.model.spelling import shortened
from bexp.transformers.float8 import convertible
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Float8, Settings, SettingsError
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.layers import BuiltLayer, ShellPart

_RELATIVE = 1e-4  # float32 sums in another order; a wrong mask or weight is off by far more
_ABSOLUTE = 1e-6


class DifferenceError(AssertionError):
    """A part computes something else than the model."""


def require_equal(what: str, actual: Tensor | None, expected: Tensor | None) -> None:
    """Raise DifferenceError if two tensors differ by more than rounding, or one is missing and the other not zero."""
    if actual is None or expected is None:
        there = actual if actual is not None else expected
        if there is not None and float(there.abs().max()) > _ABSOLUTE:
            raise DifferenceError(f"{what}: {'none' if actual is None else 'one'} where the model has another")
        return
    if actual.shape != expected.shape:
        raise DifferenceError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if not bool(torch.isfinite(expected).all()):
        raise DifferenceError(f"{what}: the model's own values are not finite")
    if actual.numel() == 0:
        return
    scale = float(expected.abs().max())
    error = float((actual - expected).abs().max())
    if not error <= _RELATIVE * scale + _ABSOLUTE:
        raise DifferenceError(f"{what}: off by {error:.2g}, the largest value is {scale:.2g}")


def require_all_equal(what: str, pairs: Iterable[tuple[str, Tensor | None, Tensor | None]]) -> None:
    """Raise DifferenceError for the first (name, actual, expected) that differs."""
    for name, actual, expected in pairs:
        require_equal(f"{what} of {name}", actual, expected)


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


LEAST_CAPABILITY = (8, 9)
"""The compute capability of the first GPUs with float8: Ada and Hopper."""


def compare_float8(builder: PartsBuilder, recipe: Float8) -> Float8Layers:
    """Run a layer of each kind at micro-batch 1 in both formats, with the same gradients coming in.

    Raises:
        UnsupportedTrialError: the device or the software has no float8, or a layer cannot be computed in it.
    """
    device = builder.device
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise UnsupportedTrialError(
            f"float8 needs a GPU of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or later; "
            f"this one has {found[0]}.{found[1]}"
        )
    number, outputs, gradients = 0, [], []
    for kind in dict.fromkeys(builder.kinds):
        part = builder.layer(kind, 1)
        expected = results_of(part)
        number += builder.kinds.count(kind) * len(list(convertible(part.module)))
        try:
            applied = set_up(part.module, Settings(float8=recipe))
            try:
                found_in_float8 = results_of(part)
            finally:
                applied.undo()
        except torch.OutOfMemoryError:
            raise
        except (SettingsError, RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
            short = shortened(" ".join(str(error).split()), 300) or type(error).__name__
            raise UnsupportedTrialError(f"float8 ({recipe}) cannot be had here: {short}") from error
        outputs.append(_relative_error(found_in_float8, expected, "output"))
        gradients.append(_relative_error(found_in_float8, expected, "gradient"))
    if not number:
        raise UnsupportedTrialError("no decoder layer has linear layers that float8 could compute")
    return Float8Layers(num_linear=number, output_error=max(outputs), gradient_error=max(gradients))


def _relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], prefix: str) -> float:
    """Return the norm of the differences of all tensors whose names begin so, relative to that of the expected ones."""
    named = {name: tensor.float() for name, tensor in expected.items() if name.startswith(prefix)}
    difference = math.hypot(*(float((actual[name].float() - tensor).norm()) for name, tensor in named.items()))
    scale = math.hypot(*(float(tensor.norm()) for tensor in named.values()))
    return difference / scale if scale else 0.0
