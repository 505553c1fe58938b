"""What must hold for each job after a campaign, read from the database."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.event import Event, EventCode, EventDraft
from bexp.explorer.records.recommendation import Recommendation
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.trials import read_trials
from tests.contracts.jobs import recommendation_rows

OF_A_TRIAL = {EventCode.TRIAL, EventCode.WHOLE_MODEL, EventCode.INFEASIBLE, EventCode.WARNING}
"""One of these is stored with each trial."""

WORKER = r"worker [\w.-]+-\d+-(replay|cpu)-[0-9a-f]+ \(.+\)"
MAX_ATTEMPTS = QueueSettings().max_attempts
GIVEN_UP = (
    f"given up after {MAX_ATTEMPTS} attempts in a row that ended with the worker or its device and brought no trial"
)
ENDS = {
    JobState.SUCCEEDED: {EventCode.SUCCEEDED},
    JobState.FAILED: {EventCode.FAILED, EventCode.NOTHING_FITS},
    JobState.CANCELLED: {EventCode.CANCELLED},
}
TEXTS = {
    EventCode.QUEUED: r"Exploration {id} (of {model} is queued|is queued again)",
    EventCode.STARTED: rf"Exploration started by {WORKER}, measuring .+",
    EventCode.RESUMED: rf"Exploration resumed by {WORKER} with {{num_trials}} stored trials?",
    EventCode.WAITING: r"Waiting for a worker: .+|Waiting: .+|A worker can run it now",
    EventCode.WARNING: r"Put back: .+",
    EventCode.CANCELLED: r"Exploration cancelled",
    EventCode.FAILED: rf"Exploration failed: {GIVEN_UP}",
}
"""By code: what storage tells, with the job's id, its model's name and the number of trials stored by then."""

BEGINS = {EventCode.WARNING: "Put back", EventCode.FAILED: "Exploration failed: given up"}
"""Of what storage tells by a code that the search has, too."""


def is_of_storage(event: EventDraft) -> bool:
    """Whether storage tells this, and not the search."""
    return event.code in TEXTS and event.message.startswith(BEGINS.get(event.code, ""))


def is_given_up(job: Job) -> bool:
    """Whether workers were lost so often, without a trial between, that no further one tries."""
    return job.state is JobState.FAILED and re.fullmatch(GIVEN_UP, job.error or "") is not None


def violations_of(database: Database, job: Job, *, num_resumes: int = 0, num_cancels: int = 0) -> list[str]:
    """Return what a finished job breaks, of which so many resumptions and cancels were asked for."""
    given_up = is_given_up(job)
    has_no_answer = given_up or (num_cancels > 0 and job.state is JobState.CANCELLED)
    events = read_events(database, job.id, after=0, limit=100_000)
    trials = [stored.trial for stored in read_trials(database, job.id, limit=100_000)]
    numbers = [trial.number for trial in trials]
    told = [event.data["trial"] for event in events if event.code in OF_A_TRIAL and "trial" in event.data]
    queued = [index for index, event in enumerate(events) if event.code is EventCode.QUEUED]
    ends = [index for index, event in enumerate(events) if event.code.ends_job]
    rows = recommendation_rows(database, job.id)
    checks = {
        "the log has a gap or a double": [event.seq for event in events] == list(range(1, len(events) + 1)),
        "the job's last seq is not the log's": job.last_seq == len(events),
        "the log does not end once each time that the job was queued": queued == [0, *(end + 1 for end in ends[:-1])]
        and ends[-1:] == [len(events) - 1],
        "the log was queued again more often than somebody asked for that": len(queued) - 1 <= num_resumes,
        "the log ends in another way than the job": bool(events) and events[-1].code in ENDS[job.state],
        "a healthy job failed": has_no_answer or job.state is JobState.SUCCEEDED,
        "the answer is not the recommendation that was told last": has_no_answer
        or (job.answer is not None and bool(rows) and _tells(rows[-1], job.recommendation)),
        "it was given up too early": not given_up or _num_fruitless(events) >= MAX_ATTEMPTS,
        "a trial is missing or doubled": numbers == list(range(len(numbers))),
        "an event of a trial is missing or doubled": told == numbers,
    }
    found = [f"{job.id}: {what} ({job.state}, {job.error})" for what, holds in checks.items() if not holds]
    return found + [f"{job.id}: a wrong text: {text}" for text in _wrong_texts(job, events)]


def _num_fruitless(events: Sequence[Event]) -> int:
    """Return how often workers have begun since the job was queued, or from the one that brought its last trial on.

    Those that put the job back are counted, though the service does not: it gives a job up no earlier than this says.
    """
    counted = 0
    for event in events:
        if "trial" in event.data or event.code is EventCode.QUEUED:
            counted = int(event.code is not EventCode.QUEUED)
        counted += event.code in {EventCode.STARTED, EventCode.RESUMED}
    return counted


def _tells(row: sa.Row[Any], best: Recommendation | None) -> bool:
    return best is not None and all(getattr(row, name) == value for name, value in best.figures._asdict().items())


def _wrong_texts(job: Job, events: Sequence[Event]) -> Iterator[str]:
    """Return what storage tells in other words than it should."""
    trials = set[int]()
    for event in events:
        if is_of_storage(event):
            known = {"id": job.id, "model": re.escape(job.model_name), "num_trials": len(trials)}
            if not re.fullmatch(TEXTS[event.code].format(**known), event.message):
                yield f"{event.code} {event.message}"
        elif "trial" in event.data:
            trials.add(event.data["trial"])
