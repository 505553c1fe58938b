"""A memory limit on a host that counts what a process uses, and not the holes of its heap."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from bexp.measure import heap, host_limits
from bexp.out_of_memory import is_out_of_memory

T = TypeVar("T")


def run_without_holes(run: Callable[[], T]) -> T:
    """Return the result of `run`. If it runs out of the host's memory, run it once more in a heap without holes.

    A process that keeps what it frees is faster, but a large tensor may fit into no hole. The limit counts the holes.
    """
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # the tensors of the failed run, whose frames are gone only here
    with heap.returning_freed(), host_limits.more_data(heap.hole_bytes()):
        return run()
