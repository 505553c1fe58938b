"""A micro-step of a trial, as its clock notes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroStep:
    """A micro-step, the number of its micro-batch, and the positions that were computed, as far as they are known.

    `is_first` says that the micro-batches are known, and that this is the first of its width, in this process or in
    another one, for which this one waits: it is not timed.
    """

    seconds: float
    is_timed: bool
    number: int | None = None
    positions: int | None = None
    is_first: bool = False
