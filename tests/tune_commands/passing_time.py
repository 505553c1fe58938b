"""Time that passes as a training is told to, however busy the host is.

A process that has imported this measures what it takes of the processor, and the seconds that it lets pass.
"""

from __future__ import annotations

import time

_passed = 0.0


def let_pass(seconds: float) -> None:
    """Have so many seconds pass, in no time."""
    global _passed  # noqa: PLW0603 - it stands for the clock, of which there is one
    _passed += seconds


def _now() -> float:
    return time.process_time() + _passed


time.perf_counter = _now
