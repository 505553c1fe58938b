"""What a running exploration hands out, to be stored before it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from explorer.events import EventDraft
from explorer.recommendations import Answer, Recommendation
from explorer.trials import Trial


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of an exploration: everything in it is stored in one transaction, or nothing is.

    `recommendation` is set when the main variant's recommendation changed, `space` when the legal space has been
    enumerated (a JSON summary), `answer` on the last step.
    """

    events: tuple[EventDraft, ...] = ()
    trial: Trial | None = None
    recommendation: Recommendation | None = None
    space: dict[str, Any] | None = field(default=None)
    answer: Answer | None = None
