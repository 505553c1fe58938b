"""Other roundings of a model, as a micro-batch of another size has them, because it takes other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

LOSS_SCALE = 0.73
"""The loss is multiplied by this, and its gradients divided: no power of two, so all roundings backwards change."""


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Change the output of each layer with parameters by about one rounding of its number format.

    In low precision two sizes of a micro-batch differ by as much, which may change the choice of a router.
    """
    layers = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    handles = [layer.register_forward_hook(_round_otherwise) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _round_otherwise(_: nn.Module, __: Any, output: Any) -> Any:
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return output
    noise = torch.rand_like(output).sub_(0.5).mul_(output.detach()).mul_(torch.finfo(output.dtype).eps)
    return output + noise
