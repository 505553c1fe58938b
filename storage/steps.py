"""What a worker's step writes: the values of the job's row, and the event of its claim."""

from __future__ import annotations

from typing import Any

from explorer.records.event import EventCode, EventDraft, Progress


def step_values(step: Progress) -> dict[str, Any]:
    """Return what a step changes in the job's row."""
    values: dict[str, Any] = {}
    if step.space is not None:
        values["space"] = step.space
    if step.recommendation is not None:
        values["recommendation"] = step.recommendation.model_dump(mode="json")
        values["micro_batch_size"] = step.recommendation.candidate.micro_batch_size
        values["confidence"] = step.recommendation.confidence
    if step.answer is not None:
        values["answer"] = step.answer.model_dump(mode="json")
        values["serves_up_to"] = step.answer.serves_up_to
    return values


def claim_event(attempt: int, worker: str, description: str | None, target: str, num_trials: int) -> EventDraft:
    """Return the event that says who has taken a job, and how much of it is stored already."""
    where = f"worker {worker}" + (f" ({description})" if description else "")
    data: dict[str, Any] = {"worker": worker, "attempt": attempt, "target": target}
    if attempt == 1:
        return EventDraft(
            code=EventCode.STARTED, message=f"Exploration started by {where}, measuring {target}", data=data
        )
    stored = f"{num_trials} stored trial{'' if num_trials == 1 else 's'}"
    data["num_trials"] = num_trials
    return EventDraft(code=EventCode.RESUMED, message=f"Exploration resumed by {where} with {stored}", data=data)
