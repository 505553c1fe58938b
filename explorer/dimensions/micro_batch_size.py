"""The micro-batch size: how many sequences a device processes in one forward and backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bexp.explorer.dimensions.dimension import Change, Column, Dimension, Point, column_of
from bexp.explorer.dimensions.place import EmptySpaceError, Place, ReportedPlace
from bexp.explorer.model.base import Frozen, RuleError

MAX_MICRO_BATCH_SIZE = 256

MicroBatch = Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH_SIZE)]


class MicroBatchRange(Frozen):
    """Bounds of an exploration; both ends belong to the space."""

    min: MicroBatch = 1
    max: MicroBatch = MAX_MICRO_BATCH_SIZE

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise RuleError(f"min ({self.min}) exceeds max ({self.max})", "min", "max")
        return self


class ExploreRange(Frozen):
    """`{explore: {min: 2, max: 64}}`: like `explore`, within bounds and regardless of the effective batch."""

    explore: MicroBatchRange


MicroBatchChoice = (
    Literal["explore", "auto"]
    | ExploreRange
    | MicroBatch
    | Annotated[tuple[MicroBatch, ...], Field(min_length=1, max_length=64)]
)


LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Micro-batch sizes of an open exploration: two an octave."""


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in ascending order."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return tuple(sorted({*small, *(number // i for i in small)}))


def ladder_between(low: int, high: int) -> tuple[int, ...]:
    """Return the ladder's values within [low, high], and both ends."""
    return tuple(sorted({low, high, *(m for m in LADDER if low <= m <= high)}))


def nearest_sizes(size: int, legal: Iterable[int]) -> tuple[int, ...]:
    """Return the largest legal size below `size` and the smallest above."""
    below = [each for each in legal if each < size]
    above = [each for each in legal if each > size]
    return (*([max(below)] if below else []), *([min(above)] if above else []))


class MicroBatchOf(Frozen):
    """The micro-batch of a candidate."""

    micro_batch_size: Annotated[int, Field(ge=1)]


class MicroBatchAsked(Frozen):
    """The field of a request about the micro-batch."""

    micro_batch_size: MicroBatchChoice | None = Field(
        None,
        description="A size, a list, a range, `explore`, or `auto`: the divisors of what a device gets of the batch. "
        "Null: `auto` if batch_size is stated, else `explore`.",
    )


FEW_DIVISORS = 4
"""With fewer divisors than this, other sizes are compared with them."""


def _to(size: int) -> Change:
    return Change(f"micro_batch_size {size}", {"micro_batch_size": size})


class MicroBatchSize(Dimension):
    """The sizes that a request names, or those that an exploration of its own tries."""

    def choice(self, place: Place) -> MicroBatchChoice:
        """Return the value of `micro_batch_size`, with the default filled in."""
        if place.asked.micro_batch_size is not None:
            return place.asked.micro_batch_size
        return "auto" if place.states_batch else "explore"

    def keeps_batch(self, place: Place) -> bool:
        """Return whether sizes must divide the stated batch: with `auto` and with one size."""
        choice = self.choice(place)
        return place.states_batch and (choice == "auto" or isinstance(choice, int))

    def divides_batch(self, place: Place) -> bool:
        """Return whether each size divides the share that a group of devices has of the batch, stated or not."""
        return self.keeps_batch(place) or self.choice(place) == "auto"

    def named(self, place: Place) -> tuple[int, ...]:
        """Return the sizes that the request names, ascending, whatever the batch; none with `auto`."""
        choice = self.choice(place)
        if isinstance(choice, ExploreRange):
            return ladder_between(choice.explore.min, choice.explore.max)
        if isinstance(choice, int):
            return (choice,)
        if isinstance(choice, tuple):
            return tuple(sorted(set(choice)))
        return () if choice == "auto" else LADDER

    def considered_over(self, size: int, place: Place) -> tuple[int, ...]:
        """Return the sizes to consider where so many devices share a sequence, ascending.

        With `auto`, or one size and a stated batch, they divide what such a group of devices gets of the batch.
        """
        sizes = self.named(place)
        if not self.divides_batch(place):
            return sizes
        share, rest = divmod(place.batch_size, place.groups_of(size))
        if rest:
            return ()
        return tuple(m for m in sizes or divisors(share) if share % m == 0 and m <= MAX_MICRO_BATCH_SIZE)

    def considered(self, place: Place) -> tuple[int, ...]:
        """Return the sizes to consider, ascending, before memory is looked at."""
        sharing = place.asked.context_parallel.sizes_at(place)
        return tuple(sorted({m for size in sharing for m in self.considered_over(size, place)}))

    def undivided(self, place: Place) -> tuple[int, ...]:
        """Return sizes next to the divisors of a stated batch that has few of them; the answer compares both."""
        sizes = self.considered(place)
        if not self.keeps_batch(place) or self.choice(place) != "auto" or len(sizes) >= FEW_DIVISORS:
            return ()
        return tuple(m for m in LADDER if m < place.batch_size / place.num_devices and m not in sizes)

    def check(self, place: Place) -> None:
        """Check that a size is left: a single size divides the share that a device has of a stated batch."""
        if self.considered(place):
            return
        size, asked = max(place.asked.context_parallel.sizes_at(place)), self.choice(place)
        who = "each device" if size == 1 else f"each group of {size} devices"
        share = place.batch_size // place.groups_of(size)
        legal = [size for size in divisors(share) if size <= MAX_MICRO_BATCH_SIZE]
        nearest = nearest_sizes(asked, legal) if isinstance(asked, int) else ()
        raise RuleError(
            f"micro_batch_size ({asked}) does not divide what {who} gets of the batch: {share} sequences of batch_size "
            f"({place.batch_size}) over num_devices ({place.num_devices}); the nearest that divide it: "
            f"{' and '.join(map(str, nearest))}. A list or a range is independent of the batch",
            "micro_batch_size",
            "batch_size",
            "num_devices",
        )

    def compared(self, place: Place) -> Mapping[str, Any]:
        """Return the sizes that do not divide the batch."""
        sizes = self.undivided(place)
        return {"micro_batch_size": sizes} if sizes else {}

    def relaxations(self, place: ReportedPlace) -> Iterable[Change]:
        """Yield smaller sizes, the largest first, because it is the smallest change."""
        smallest = self.considered(place)[0]
        yield from (_to(1 << i) for i in range(8, -1, -1) if 1 << i < smallest)

    def column(self, place: ReportedPlace) -> Column:
        """Return all sizes, whether or not they fit the memory."""
        sizes, fixed = self.considered(place), place.model.fixed_micro_batch_size
        if fixed is not None and fixed not in sizes:
            raise EmptySpaceError(f"the micro-batch has to stay {fixed}, because its samples depend on each other")
        if fixed is not None:
            return column_of("micro_batch_size", (fixed,))
        most = place.model.largest_micro_batch_size(place.num_devices)
        if most is not None and sizes and sizes[0] > most:
            raise EmptySpaceError(f"the training has too few samples for a micro-batch of {sizes[0]}: {most} at most")
        return column_of("micro_batch_size", [size for size in sizes if most is None or size <= most])

    def bases(self, place: ReportedPlace) -> Column:
        """Return the smallest size, or the one that the request names; the largest below that has enough samples."""
        stated = place.model.fixed_micro_batch_size or place.base_micro_batch_size
        most = place.model.largest_micro_batch_size(place.num_devices)

        def smallest(known: Point) -> Iterable[Point]:
            sizes = [
                m for m in self.considered_over(known["context_parallel_size"], place) if most is None or m <= most
            ]
            if stated is None:
                return [{"micro_batch_size": size} for size in sizes[:1]]
            is_too_large = most is not None and stated > most
            return [{"micro_batch_size": size} for size in (sizes[-1:] if is_too_large else (stated,))]

        return smallest


MICRO_BATCH_SIZE = MicroBatchSize(
    name="micro_batch_size",
    fields=("micro_batch_size",),
    label=lambda candidate: f"micro_batch_size={candidate.micro_batch_size}",
    term=None,
    least=_to(1),
)
