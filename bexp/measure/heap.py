"""Memory that the collector need not look at, or that a process has freed and the system still counts as its own."""

from __future__ import annotations

import ctypes
import gc
import sys


def freeze_imports() -> None:
    """Exempt the hundreds of thousands of objects of an import from the collections before timings.

    Call this while no job's objects are alive, because garbage among exempt objects stays for ever.
    """
    gc.collect()
    gc.freeze()


def trim() -> None:
    """Give freed heap memory back to the system, so that it does not count as this process's."""
    if sys.platform == "linux":
        trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent in musl
        if trim_heap is not None:
            trim_heap(0)
