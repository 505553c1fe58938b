"""The level of sharding: which training state is spread over the devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from bexp.explorer.dimensions.dimension import Change, Column, Dimension, Term, column_of, named
from bexp.explorer.dimensions.place import Place, ReportedPlace
from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.training import Sharding

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate


class ShardingOf(Frozen):
    """The level of sharding of a candidate."""

    sharding: Sharding | None = Field(
        None, description="Null: the request's training.sharding, because it has no sharding_levels."
    )


class ShardingAsked(Frozen):
    """The field of a request about levels of sharding, in addition to training.sharding."""

    sharding_levels: (
        Literal["explore"] | Annotated[tuple[Sharding, ...], Field(min_length=1, max_length=len(Sharding))] | None
    ) = Field(
        None,
        description="Levels to choose among in place of training.sharding, `explore` for all; a list or `explore` "
        "there means the same.",
    )


class ShardingLevels(Dimension):
    """The levels that may be chosen in place of the request's own."""

    def considered(self, place: Place) -> tuple[Sharding | None, ...]:
        """Return the levels that a candidate may have, lowest first, or None alone where there is no choice."""
        levels = place.asked.sharding_levels
        if levels is None or not place.is_training:
            return (None,)
        if levels == "explore":
            return tuple(Sharding) if place.num_devices > 1 else (Sharding.NONE,)
        return tuple(level for level in Sharding if level in levels)

    def highest(self, place: Place) -> Sharding:
        """Return the level, among those that may be chosen, that leaves the least training state on a device."""
        return self.considered(place)[-1] or place.training.sharding

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> Sharding:
        """Return the level that a candidate was measured with."""
        return candidate.sharding or place.training.sharding

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield the levels that are named, or the request's own."""
        levels = place.asked.sharding_levels
        if levels is None:
            return (("training.sharding", place.training.sharding),)
        return (("sharding_levels", level) for level in (() if levels == "explore" else levels))

    def check(self, place: Place) -> None:
        """Check that sharding is either given or chosen, and that there are several devices."""
        levels, given = place.asked.sharding_levels, place.training.sharding
        if levels is not None and given is not Sharding.NONE:
            raise RuleError(
                "sharding_levels take the place of training.sharding: give one of them",
                "sharding_levels",
                "training.sharding",
            )
        asked = given if levels is None else self.highest(place)
        if asked is not Sharding.NONE and place.num_devices == 1:
            field = "training.sharding" if levels is None else "sharding_levels"
            raise RuleError(f"sharding '{asked}' needs num_devices > 1", field, "num_devices")

    def relaxations(self, place: ReportedPlace) -> Iterable[Change]:
        """Yield higher levels."""
        highest = self.highest(place)
        if place.is_training and place.num_devices > 1:
            for level in Sharding:
                if level.level > highest.level:
                    yield Change(f"sharding {level}", self.settings_of(level, place))

    def settings_of(self, level: Sharding, place: Place) -> dict[str, Any]:
        """Return the fields of a request that has this level."""
        settings: dict[str, Any] = {"training": place.training.model_copy(update={"sharding": level})}
        return settings if place.asked.sharding_levels is None else {**settings, "sharding_levels": None}

    def column(self, place: ReportedPlace) -> Column:
        """Return all levels."""
        return column_of("sharding", self.considered(place))

    def bases(self, place: ReportedPlace) -> Column:
        """Return all levels, lowest first."""
        return self.column(place)


SHARDING = ShardingLevels(
    name="sharding",
    fields=("sharding",),
    asked="sharding_levels",
    term=Term(
        lambda level, lacking: f"the sharding level '{level}'",
        usual=frozenset({Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3}),
    ),
    **named("sharding", "sharding"),
)
