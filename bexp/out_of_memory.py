"""The errors that mean a lack of memory.

The module needs no torch, because a worker reads the last words of a process by it.
"""

from __future__ import annotations

EXHAUSTED = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
)
"""Texts of torch, CUDA's libraries, C++ and the system when memory runs out, in lower case."""


def says_exhausted(text: str) -> bool:
    """Return whether a text says that memory ran out."""
    said = text.lower()
    return any(words in said for words in EXHAUSTED)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of device or host ran out. Torch raises a plain RuntimeError for the host's."""
    is_torchs = any(each.__name__ == "OutOfMemoryError" for each in type(error).__mro__)
    return is_torchs or isinstance(error, MemoryError) or says_exhausted(str(error))
