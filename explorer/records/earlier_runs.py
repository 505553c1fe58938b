"""Runs of components in earlier explorations, on the same hardware with the same versions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.model.base import Frozen
from bexp.explorer.records.measurement import ComponentMeasurement


class EarlierRun(Frozen):
    """One run of a component, and its age when this exploration began."""

    measurement: ComponentMeasurement
    age_seconds: Annotated[float, Field(ge=0)]


class EarlierRuns(Frozen):
    """The runs that an exploration may reuse, fixed when it begins, so that a resumed one sees the same.

    `num_ignored` counts components of the same model that are not reused, because they were measured with the versions
    in `other_versions`.
    """

    runs: tuple[EarlierRun, ...] = ()
    num_explorations: Annotated[int, Field(ge=0)] = Field(0, description="Explorations that measured them.")
    num_ignored: Annotated[int, Field(ge=0)] = 0
    other_versions: tuple[str, ...] = ()


class ReusedComponents(Frozen):
    """The components that an answer has from earlier explorations.

    `num_checked` of the components were measured again before the others were trusted. They differ by at most
    `largest_difference`, a share of the earlier time.
    """

    num_components: Annotated[int, Field(ge=0)] = Field(description="Reused, and not measured again since.")
    num_explorations: Annotated[int, Field(ge=1)]
    num_checked: Annotated[int, Field(ge=1)]
    largest_difference: Annotated[float, Field(ge=0)]
