"""The setting of PyTorch's CUDA allocator. It takes effect only if it is made before CUDA starts."""

from __future__ import annotations

import os

import torch

from bexp.transformers.settings import Allocator

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables that torch reads it from; the second is the older name."""
_OPTION = "expandable_segments"


def current_allocator() -> Allocator:
    """Return the setting that the environment asks for."""
    for name in VARIABLES:
        for part in os.environ.get(name, "").split(","):
            key, _, value = part.partition(":")
            if key.strip() == _OPTION:
                return "expandable_segments" if value.strip().lower() == "true" else "default"
    return "default"


def set_allocator(allocator: Allocator) -> str | None:
    """Set `allocator` in this process's environment; return None if that works, else what the user has to do.

    Child processes inherit the setting. The allocator no longer changes once CUDA has started.
    """
    if current_allocator() == allocator:
        return None
    value = "True" if allocator == "expandable_segments" else "False"
    if torch.cuda.is_initialized():
        return (
            f"CUDA has already started with another allocator setting than the one that was measured: set "
            f"{VARIABLES[0]}={_OPTION}:{value} before the program starts"
        )
    name = next((name for name in VARIABLES if os.environ.get(name)), VARIABLES[0])
    kept = [part for part in os.environ.get(name, "").split(",") if part and not part.strip().startswith(_OPTION)]
    os.environ[name] = ",".join([*kept, f"{_OPTION}:{value}"])
    return None
