"""The check whether accumulation changes the gradients of a training, and the cause if it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from bexp.out_of_memory import is_out_of_memory
from bexp.tune.agreement_text import AccumulationCheck, Cause, Finding
from bexp.tune.compilation import eagerly
from bexp.tune.gradients import Gradient, best_weights, cosine, difference, differences_by_kind

ALLOWED = 3.0
"""Gradients agree if they differ by at most so many times the spread."""
LEAST_TOLERANCE = 1e-5
"""Smaller differences change no training, even where two orders give the very same bits."""
MOST_SPREAD = 0.1
"""Where two orders of the same samples differ by more, something is random, and nothing can be judged."""
EXPLAINED = 0.2
"""A cause fits if no larger share of the difference is left without it."""

Parts = Sequence[Sequence[int]]
"""The places in the global batch of the samples of each micro-batch."""


class CannotCheckError(ValueError):
    """The gradients cannot be compared; the message says why."""


class Training(Protocol):
    """A training that computes the gradients of one global batch, with nothing random in its model."""

    @property
    def num_devices(self) -> int:
        """Number of devices, each with one process."""

    def gradient(self, parts: Parts, *, rounds_otherwise: bool = False, is_swapped: bool = False) -> Gradient:
        """Return the gradient after all micro-batches.

        With `rounds_otherwise`, all roundings differ, and so do numbers that are still random. With `is_swapped`, each
        device has other samples of the batch.
        """

    def steps(self, parts: Parts) -> list[Gradient]:
        """Return the addend of each micro-batch to the gradient, on each device."""

    def remedies(self) -> Mapping[Cause, Callable[[], AbstractContextManager[None]]]:
        """Return contexts that switch off parts of this model that depend on the whole micro-batch."""


@dataclass(frozen=True)
class _Judged:
    """A comparison of two gradients, and their tolerated difference."""

    share: float
    tolerance: float
    kind: str | None
    kind_share: float

    @property
    def agrees(self) -> bool:
        return self.share <= self.tolerance and self.kind is None

    def is_explained_by(self, left: _Judged) -> bool:
        """Return whether so little of the difference is `left` without a cause that the cause fits."""
        if left.agrees:
            return True
        return self.share > self.tolerance and left.share <= max(left.tolerance, EXPLAINED * self.share)


@eagerly()
def check(training: Training, number: int, size: int, note: str | None = None) -> AccumulationCheck:
    """Compare the gradients of `number` samples as one micro-batch and in micro-batches of `size`.

    If one micro-batch does not fit the memory, the largest that fits is compared, and `size` shrinks if it must.
    Nothing is compiled: each shape would take as long as a trial.

    Raises CannotCheckError if two orders of the same samples have different gradients, or no numbers at all.
    """
    large, whole, other = _largest(training, number)
    if large <= size:
        size = max(divisor for divisor in divisors(number) if divisor < large)
    comparison = _Comparison(training, number, (large, size), whole, other)
    judged = comparison.judge(comparison.whole, comparison.accumulated)
    compared, cause = comparison.accumulated, None
    if not judged.agrees:
        cause = comparison.find_cause(judged)
    elif training.num_devices > 1:
        swapped = training.gradient(comparison.whole_parts, is_swapped=True)
        on_others = comparison.judge(comparison.whole, swapped)
        if not on_others.agrees:
            judged, compared, cause = on_others, swapped, Finding(Cause.DEVICE)
    return AccumulationCheck.of(
        agrees=judged.agrees,
        shape=(number, large, size),
        norms=(comparison.whole.norm, compared.norm),
        cosine=cosine(comparison.whole, compared),
        difference=judged.share,
        spread=comparison.spread,
        tolerance=judged.tolerance,
        kind=None if judged.kind is None else (judged.kind, judged.kind_share),
        finding=cause,
        note=note,
    )


def divisors(number: int) -> list[int]:
    """The divisors of a number, the largest first."""
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def split(number: int, size: int) -> list[list[int]]:
    """The places of a batch in micro-batches of a size."""
    return [list(range(start, start + size)) for start in range(0, number, size)]


def _largest(training: Training, number: int) -> tuple[int, Gradient, Gradient]:
    """The largest micro-batch that fits the memory, and its gradients in two orders of the samples."""
    sizes = [divisor for divisor in divisors(number) if divisor > 1]
    for large in sizes:
        parts = split(number, large)
        try:
            return large, _finite(training.gradient(parts)), _other(training, parts)
        except Exception as error:  # which kind says that memory is short differs between devices
            # The other processes wait for this one's gradients.
            if training.num_devices > 1 or not is_out_of_memory(error) or large == sizes[-1]:
                raise
    raise CannotCheckError(f"a batch of {number} cannot be split")


class _Comparison:
    """The gradients of one batch in both shapes, and in two orders of each."""

    def __init__(
        self, training: Training, number: int, sizes: tuple[int, int], whole: Gradient, other: Gradient
    ) -> None:
        self._training = training
        self.whole_parts, self._parts = (split(number, size) for size in sizes)
        self.whole = whole
        self.accumulated = _finite(training.gradient(self._parts))
        orders = [(whole, other), (self.accumulated, _other(training, self._parts))]
        self.spread = max(difference(*pair) for pair in orders)
        if self.spread > MOST_SPREAD:
            raise CannotCheckError(
                f"the same samples in another order have gradients that differ by {self.spread:.0%}: something is "
                "random apart from dropout, such as masks that are drawn anew. Make it repeatable"
            )
        by_kind = [differences_by_kind(*pair) for pair in orders]
        self._kind_spreads = {kind: max(found.get(kind, 0.0) for found in by_kind) for kind in by_kind[0]}

    def judge(self, first: Gradient, second: Gradient) -> _Judged:
        """Compare two gradients, whole and by kinds of weights, with the difference that the spread allows."""
        tolerance = max(ALLOWED * self.spread, LEAST_TOLERANCE)
        worst: tuple[str | None, float] = (None, 0.0)
        for kind, share in differences_by_kind(first, second).items():
            allowed = max(ALLOWED * self._kind_spreads.get(kind, 0.0), tolerance)
            if share > max(allowed, worst[1]):
                worst = (kind, share)
        return _Judged(difference(first, second), tolerance, *worst)

    def find_cause(self, judged: _Judged) -> Finding:
        """Try one known cause after the other."""
        ratio = self.accumulated.norm / self.whole.norm
        if self.judge(self.whole, self.accumulated * (1 / ratio)).agrees:
            return Finding(Cause.SCALED, ratio=ratio)
        for cause, switched_off in self._training.remedies().items():
            with switched_off():
                first, second = map(self._training.gradient, (self.whole_parts, self._parts))
            if first.is_finite and second.is_finite and judged.is_explained_by(self.judge(first, second)):
                return Finding(cause)
        steps = self._training.steps(self._parts)
        weights = best_weights(self.whole, steps)
        nearest = Gradient.weighted(weights, steps)
        scaled = self.judge(self.whole, self.accumulated * (1 / ratio))
        if min(weights) > 0.0 and scaled.is_explained_by(self.judge(self.whole, nearest)):
            mean = sum(weights) / len(weights)
            return Finding(Cause.AVERAGED, 1 / mean, (min(weights) / mean, max(weights) / mean))
        return Finding(Cause.TOGETHER)


def _other(training: Training, parts: Parts) -> Gradient:
    """The gradient of the same micro-batches in reverse order, with their samples in reverse order."""
    return _finite(training.gradient([list(reversed(part)) for part in reversed(parts)], rounds_otherwise=True))


def _finite(gradient: Gradient) -> Gradient:
    if not gradient.is_finite:
        raise CannotCheckError("the gradients are not finite")
    if gradient.norm == 0.0:
        raise CannotCheckError("the gradients are zero")
    return gradient
