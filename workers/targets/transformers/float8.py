"""Layers in float8, compared with the same layers in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bexp.explorer.model.parts import Float8Layers
from bexp.explorer.model.spelling import shortened
from bexp.transformers.float8 import convertible
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Float8, Settings, SettingsError
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.results import results_of

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
