"""Allocates the results of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""What torch's own compiler emits: it costs the host a fraction of `torch.empty`."""


def empty(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on the device of `like`; a CUDA device must be the current one.

    In deterministic mode torch itself allocates, because it fills new memory then.
    """
    if _empty_strided_cuda is None or not like.is_cuda or torch.are_deterministic_algorithms_enabled():
        return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
    found: Tensor = _empty_strided_cuda(shape, strides, dtype)
    return found


def checked(out: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `out`, which a caller has allocated for a contiguous result of that shape and of `like`'s dtype."""
    assert out.shape == shape and out.dtype == like.dtype and out.is_contiguous(), "the result's shape and dtype"
    return out
