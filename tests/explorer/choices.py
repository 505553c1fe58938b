"""What candidates may have of a choice, before the device is asked."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.dimension import Choice
from bexp.explorer.request.request import RequestedSpace


def choices_of(space: RequestedSpace, choice: Choice[Any]) -> tuple[Any, ...]:
    return choice.written(space.asked, choice.considered(space.place))
