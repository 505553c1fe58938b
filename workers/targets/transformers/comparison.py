"""The comparison of two tensors that may differ by rounding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

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
