"""A choice that the target itself offers."""

from __future__ import annotations

from pydantic import Field

from bexp.explorer.dimensions.dimension import Dimension
from bexp.explorer.model.base import Frozen


class SettingsOf(Frozen):
    """The choice of a candidate among those of its target."""

    settings: str | None = Field(None, description="A choice that the target itself offers, such as `compile=true`.")


SETTINGS = Dimension(
    name="settings",
    fields=("settings",),
    label=lambda candidate: candidate.settings,
    row=lambda candidate: None if candidate.settings is None else ("settings", candidate.settings),
)
