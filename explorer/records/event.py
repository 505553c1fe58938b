"""Events, which are appended to a job's log and streamed. A BEXP line is one rendering of an event."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Annotated, Any

from pydantic import Field

from bexp.explorer.model.amounts import rate_text
from bexp.explorer.model.base import Frozen
from bexp.explorer.records.recommendation import Answer, Recommendation
from bexp.explorer.records.trial import Trial


class EventCode(IntEnum):
    """The number behind `BEXP` in a log line: 1xx progress, 2xx results, 3xx trouble, 4xx the end."""

    QUEUED = 101
    STARTED = 102
    SPACE = 103
    BASE = 104
    WAITING = 105
    RESUMED = 106
    VARIANT = 107
    REAL_RUNS = 108
    REUSED = 109
    ANSWERED = 110
    WEIGHTS = 111
    TRIAL = 201
    RECOMMENDATION = 202
    WHOLE_MODEL = 203
    ANSWER_CHANGED = 204
    EAGER = 205
    INFEASIBLE = 301
    WARNING = 302
    PROFILER_REPLACED = 303
    SUCCEEDED = 401
    NOTHING_FITS = 402
    FAILED = 403
    CANCELLED = 404

    @property
    def ends_job(self) -> bool:
        """Whether this is the last event of a job, unless the job is resumed."""
        return self >= EventCode.SUCCEEDED


class EventDraft(Frozen):
    """An event that the log has not numbered yet."""

    code: EventCode
    message: str
    data: dict[str, Any] = Field(default_factory=dict)


class Event(EventDraft):
    """An event of a job's log. `seq` counts from 1 without gaps; it is the SSE id and the page cursor."""

    seq: Annotated[int, Field(ge=1)]
    at: datetime


def render_line(event: Event) -> str:
    """Return the BEXP line of an event, without a line break: `BEXP202 19:39:45 GMT  Current recommended ...`."""
    return f"BEXP{int(event.code)} {event.at.astimezone(UTC):%H:%M:%S} GMT  {render_message(event)}"


def render_message(event: EventDraft) -> str:
    """Return the message on one line."""
    return " ".join(event.message.split())


def recommendation_event(recommendation: Recommendation) -> EventDraft:
    """Return the event of a new recommendation; its line reads as Cerebras' automatic batch exploration prints it."""
    return EventDraft(
        code=EventCode.RECOMMENDATION,
        message=(
            f"Current recommended micro_batch_size: {recommendation.candidate.micro_batch_size}, "
            f"estimated performance: {recommendation.performance:.2f}x base, "
            f"confidence score: {recommendation.confidence} (out of 100)"
        ),
        data={"recommendation": recommendation.model_dump(mode="json")},
    )


def end_event(answer: Answer, confidence_target: int) -> EventDraft:
    """Return the last event of an exploration: its recommendation, called provisional below the target, or why none."""
    data = {"answer": answer.model_dump(mode="json")}
    best = answer.recommendation
    if best is None:
        reason = answer.variants[0].reason or "no candidate fits"
        return EventDraft(code=EventCode.NOTHING_FITS, message=f"No recommendation: {reason}", data=data)
    doubt = f", provisional: {confidence_target} was asked for" if best.confidence < confidence_target else ""
    gain = f"{best.performance:.2f}x base"
    return EventDraft(
        code=EventCode.SUCCEEDED,
        message=f"Recommended: {_with_rate(best)}, {gain}, confidence {best.confidence}{doubt}",
        data=data,
    )


def _with_rate(best: Recommendation) -> str:
    """Return the candidate and its rate, and first how devices share the model, if they do."""
    rate = rate_text(best.expected_tokens_per_second, best.rate_unit)
    if best.plan is None:
        return f"{best.candidate.describe()}: {rate}"
    return f"{best.plan.parallelism.describe_candidate(best.candidate)}: {rate} of each device"


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of an exploration, which is stored in one transaction: all of it or nothing.

    A new `recommendation` is stored as a row of `bexp_recommendations` if it differs from the last one. If its text has
    changed, it is also a BEXP202 among the `events`.
    """

    events: tuple[EventDraft, ...] = ()
    trial: Trial | None = None
    recommendation: Recommendation | None = None
    """The current one of a variant."""
    is_main: bool = True
    """Whether the variant is the main one, whose recommendation is that of the job."""
    space: dict[str, Any] | None = field(default=None)
    """A JSON summary of the legal space, in the step that has enumerated it."""
    answer: Answer | None = None
    """The answer, in the last step."""
