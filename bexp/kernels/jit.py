"""Triton's compiler as a typed decorator, so that the kernels type-check where Triton is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit`: `kernel[grid](...)` launches, and kernels call each other as functions."""
    return triton.jit(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit` to a kernel that is launched. It is not recompiled for numbers that change with the batch."""
    return triton.jit(function, do_not_specialize=("num_pairs", "num_blocks"))
