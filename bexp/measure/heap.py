"""Memory that the collector need not look at, or that a process has freed and the system still counts as its own."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

M_MMAP_MAX = -4
"""The parameter of glibc's mallopt: how many blocks may have memory of their own, which goes back once freed."""
USUAL_MMAP_MAX = 1 << 16
HEAP_FIGURES = 10
FREE_FIGURE = 8
"""The place of the free bytes among the figures of glibc's mallinfo2."""


def freeze_imports() -> None:
    """Exempt the hundreds of thousands of objects of an import from the collections before timings.

    Call this while no job's objects are alive, because garbage among exempt objects stays for ever.
    """
    gc.collect()
    gc.freeze()


class _HeapInfo(ctypes.Structure):
    _fields_ = (("figures", ctypes.c_size_t * HEAP_FIGURES),)


def trim() -> None:
    """Give freed heap memory back to the system, so that it does not count as this process's."""
    trim_heap = _glibc("malloc_trim")
    if trim_heap is not None:
        trim_heap(0)


def hole_bytes() -> int:
    """Return the freed bytes that the heap still has; 0 where the library does not say."""
    info = _glibc("mallinfo2")
    if info is None:
        return 0
    info.restype = _HeapInfo
    return int(info().figures[FREE_FIGURE])


@contextmanager
def returning_freed() -> Iterator[None]:
    """Give freed memory back to the system, and within the context also what large tensors free, at once."""
    trim()
    set_option = _glibc("mallopt")
    if set_option is None:
        yield
        return
    set_option(M_MMAP_MAX, USUAL_MMAP_MAX)
    try:
        yield
    finally:
        set_option(M_MMAP_MAX, int(os.environ.get("MALLOC_MMAP_MAX_", USUAL_MMAP_MAX)))


def _glibc(name: str) -> Any:
    """Return a function of the C library; None if it has none, as musl, or outside Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
