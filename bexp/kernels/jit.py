"""Triton's compiler as a typed decorator, so that the kernels type-check where Triton is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`: `kernel[grid](...)` launches, and kernels call each other as functions."""
    return triton.jit(function)


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit` for what is launched: numbers that change with the batch recompile nothing."""
    return triton.jit(function, do_not_specialize=("num_pairs", "num_blocks"))
