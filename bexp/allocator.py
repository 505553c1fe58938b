"""The setting of PyTorch's CUDA allocator, which must be made before CUDA starts."""

from __future__ import annotations

import os

import torch

from bexp.transformers.settings import Allocator

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""What torch reads it from; the second is the older name."""
_OPTION = "expandable_segments"


def current_allocator() -> Allocator:
    """The setting that the environment asks for."""
    for name in VARIABLES:
        for part in os.environ.get(name, "").split(","):
            key, _, value = part.partition(":")
            if key.strip() == _OPTION:
                return "expandable_segments" if value.strip().lower() == "true" else "default"
    return "default"


def set_allocator(allocator: Allocator) -> str | None:
    """Ask for `allocator` in this process's environment; null if that works, else what the user has to do.

    Child processes inherit the setting. Once CUDA has started the allocator no longer changes.
    """
    if current_allocator() == allocator:
        return None
    value = "True" if allocator == "expandable_segments" else "False"
    if torch.cuda.is_initialized():
        return (
            f"CUDA has started under another allocator than the one that was measured: set "
            f"{VARIABLES[0]}={_OPTION}:{value} before the program starts"
        )
    name = next((name for name in VARIABLES if os.environ.get(name)), VARIABLES[0])
    kept = [part for part in os.environ.get(name, "").split(",") if part and not part.strip().startswith(_OPTION)]
    os.environ[name] = ",".join([*kept, f"{_OPTION}:{value}"])
    return None
