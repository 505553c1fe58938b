"""The errors that mean a lack of memory."""

from __future__ import annotations

import torch

EXHAUSTED = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
)
"""Texts of torch, CUDA's libraries, C++ and the system when memory runs out, in lower case."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of device or host ran out. Torch raises a plain RuntimeError for the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return any(words in said for words in EXHAUSTED)
