"""Gives memory that requests no longer need back to the system.

A request of 256 KiB takes up to 8 MiB while it is read, in many small pieces. The C library keeps the pages of freed
pieces, so that after many such requests a process would seem to need 30 MiB or more that it does not use.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys

from anyio.to_thread import run_sync

from bexp.api.background import Beat

TRIM_SECONDS = 30.0


async def keep_trimmed(beat: Beat) -> None:
    """Trim until cancelled; `beat` is called after each time."""
    while True:
        await run_sync(trim)
        beat()
        await asyncio.sleep(TRIM_SECONDS)


def trim() -> None:
    """Give pages that hold nothing back to the system; does nothing where the C library cannot."""
    if sys.platform == "linux":
        trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # absent in musl
        if trim_heap is not None:
            trim_heap(0)
