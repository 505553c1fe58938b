"""torch.compile with static shapes, one block at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_RECOMPILE_LIMIT = 1 << 12


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` under torch.compile with static shapes.

    A profile compiles the same code for many shapes. torch's limit of a few is lifted, because beyond it code silently
    runs eagerly.
    """
    import torch._dynamo.config as dynamo  # noqa: PLC0415 - takes seconds, and eager runs do not need it

    dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILE_LIMIT)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, _RECOMPILE_LIMIT)
    return torch.compile(function, dynamic=False)


def left_eager(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, kept out of the graph of a compiled caller."""
    wrapped: Callable[P, R] = torch.compiler.disable(function)
    return wrapped
