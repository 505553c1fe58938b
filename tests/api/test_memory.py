"""Freed memory goes back to the system."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest

from bexp.api.service import keep_trimmed
from tests.waits import PATIENCE_SECONDS

PIECE_BYTES, NUM_PIECES = 1 << 16, 1000
"""Pieces for the heap, and larger than most holes that other tests have left there: their edges are resident."""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of other systems is not told to")
def test_the_pages_of_freed_pieces_go_back() -> None:
    process = psutil.Process()
    pieces = [b"-" * PIECE_BYTES for _ in range(NUM_PIECES)]
    kept = pieces[::100]  # scattered, so that the heap cannot shrink from its end
    pieces.clear()
    before = process.memory_info().rss

    async def trim_once() -> None:
        trimmed = asyncio.Event()
        task = asyncio.create_task(keep_trimmed(trimmed.set))
        await asyncio.wait_for(trimmed.wait(), PATIENCE_SECONDS)
        task.cancel()

    asyncio.run(trim_once())
    assert before - process.memory_info().rss > PIECE_BYTES * NUM_PIECES / 2
    assert len(kept) == NUM_PIECES / 100
