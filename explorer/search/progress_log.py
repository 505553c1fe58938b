"""Turns a trial and its events into a `Progress`: one step, with what is recommended after it."""

from __future__ import annotations

from typing import Any

from bexp.explorer.records.event import EventDraft, Progress, recommendation_event, render_message
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial


class ProgressLog:
    """Makes the steps of one search. A recommendation event is emitted only when its message changes.

    `is_main` says that its recommendation and its space are the job's.
    """

    def __init__(self, *, is_main: bool = True) -> None:
        self._is_main = is_main
        self._unsent: list[EventDraft] = []
        self._space: dict[str, Any] | None = None
        self._last_message = ""

    @property
    def is_pending(self) -> bool:
        """Whether there is an event for the next step."""
        return bool(self._unsent)

    def add(self, *events: EventDraft) -> None:
        """Emit events with the next step."""
        self._unsent += events

    def describe_space(self, summary: dict[str, Any]) -> None:
        """Say with the next step what the space is: the values of each dimension."""
        self._space = summary if self._is_main else None

    def resume(self, recommendation: Recommendation | None) -> None:
        """Take `recommendation` as emitted, because an earlier lease has stored it."""
        if recommendation is not None:
            self._last_message = render_message(recommendation_event(recommendation))

    def step(
        self,
        trial: Trial | None = None,
        events: list[EventDraft] | None = None,
        recommendation: Recommendation | None = None,
    ) -> Progress:
        """The next step, with everything that was not emitted yet."""
        drafts, space = [*self._unsent, *(events or [])], self._space
        self._unsent, self._space = [], None
        if recommendation is not None:
            event = recommendation_event(recommendation)
            if render_message(event) != self._last_message:
                self._last_message = render_message(event)
                drafts.append(event)
        return Progress(tuple(drafts), trial, recommendation, self._is_main, space)
