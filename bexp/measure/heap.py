"""Memory that a process has freed and the system still counts as its own."""

from __future__ import annotations

import ctypes
import sys


def trim() -> None:
    """Give freed heap memory back to the system, so that it does not count as this process's."""
    if sys.platform == "linux":
        trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent in musl
        if trim_heap is not None:
            trim_heap(0)
