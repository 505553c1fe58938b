"""A micro-step of a trial, as its clock notes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroStep:
    """A micro-step, with its micro-batch as far as that is known."""

    seconds: float
    is_timed: bool
    number: int | None = None
    """Of the micro-batch."""
    positions: int | None = None
    """Tokens that were computed, padding included."""
    is_first: bool = False
    """The first of its width, in this process or in another one for which this one waits. It is not timed."""
