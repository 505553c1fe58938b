"""Turns a trial and its events into a `Progress`: one step, with the recommendation if it changed."""

from __future__ import annotations

from typing import Any

from bexp.explorer.cost_model.step import memory_limit
from bexp.explorer.records.event import EventDraft, Progress, recommendation_event, render_message
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.event_messages import space_event, variant_event
from bexp.explorer.search.pruned_space import PrunedSpace
from bexp.explorer.search.variant_context import VariantContext
from bexp.explorer.spec.request import ExplorationRequest


class ProgressLog:
    """Makes the steps of one variant. A recommendation event is emitted only when its message changes.

    The first step of a variant also says what its space is. After a resume that was said before, and is not said again.
    """

    def __init__(self, context: VariantContext, space: PrunedSpace) -> None:
        self._is_main = context.is_main
        self._unsent: list[EventDraft] = []
        self._space: dict[str, Any] | None = None
        self._last_message = ""
        if context.trials:
            return
        if len(context.request.space.variants()) > 1:
            self._unsent.append(variant_event(context.model))
        limit = memory_limit(context.request, context.report.hardware)
        useful = _largest_useful(context.request)
        self._unsent.append(space_event(space.legal, space.num_predicted_out, limit, largest_useful=useful))
        self._space = space.legal.summarize() if context.is_main else None

    def add(self, event: EventDraft) -> None:
        """Emit an event with the next step."""
        self._unsent.append(event)

    def resume(self, recommendation: Recommendation | None) -> None:
        """Take `recommendation` as emitted: an earlier lease has stored it."""
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
        shown = recommendation if self._is_main else None
        return Progress(events=tuple(drafts), trial=trial, recommendation=shown, space=space)


def _largest_useful(request: ExplorationRequest) -> int | None:
    """What a device, or a group that shares sequences, gets of the batch; null if the request names no larger size."""
    space = request.space
    useful = {size: space.largest_useful_micro_batch(size) for size in request.devices.context_parallel_sizes}
    beyond = [s for s, most in useful.items() if most and max(space.named_micro_batch_sizes(s), default=0) > most]
    return max((most for most in useful.values() if most), default=None) if beyond else None
