"""Calls autograd functions, and runs their backward, at less cost to the host than torch's own wrappers.

A small model's layer waits for the host, and an autograd function in Python costs it as much as several launches. Part
of that is written in Python, and does nothing for a function that is neither transformed by functorch nor compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def applied(function: type[Function]) -> Callable[..., Any]:
    """Return `function.apply`, which goes straight to the call in C++ where no compiler and no transform needs more.

    `function` has no `setup_context`. A tensor that outlived a transform of functorch is not unwrapped.
    """
    directly = super(Function, function).apply  # type: ignore[misc]  # torch's stubs lack the class in C++

    def apply(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or _is_transformed():
            return function.apply(*inputs)
        return directly(*inputs)

    return apply


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward like torch's `once_differentiable`, without a change of mode if no graph of it is asked for."""
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
