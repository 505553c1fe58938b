"""A choice that the target itself offers."""

from __future__ import annotations

from pydantic import Field

from bexp.explorer.dimensions.dimension import Column, Dimension, column_of
from bexp.explorer.dimensions.place import ReportedPlace
from bexp.explorer.model.base import Frozen


class SettingsOf(Frozen):
    """The choice of a candidate among those of its target."""

    settings: str | None = Field(None, description="A choice that the target itself offers, such as `compile=true`.")


class TargetSettings(Dimension):
    """The choices that the target offers; the first is its default."""

    def column(self, place: ReportedPlace) -> Column:
        """Return all of them."""
        return column_of("settings", place.model.settings or (None,))


SETTINGS = TargetSettings(
    name="settings",
    fields=("settings",),
    term=None,
    label=lambda candidate: candidate.settings,
    row=lambda candidate: None if candidate.settings is None else ("settings", candidate.settings),
)
