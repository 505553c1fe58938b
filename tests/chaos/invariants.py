"""What must hold for each job after a campaign, read from the database."""

from __future__ import annotations

from bexp.explorer.records.event import EventCode
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState
from bexp.storage.trials import read_trials

OF_A_TRIAL = {EventCode.TRIAL, EventCode.WHOLE_MODEL, EventCode.INFEASIBLE, EventCode.WARNING}
"""One of these is stored with each trial."""


def violations_of(database: Database, job: Job, *, may_be_cancelled: bool = False) -> list[str]:
    """Return what a finished job breaks. One that somebody asked to cancel may have ended before."""
    is_cancelled = may_be_cancelled and job.state is JobState.CANCELLED
    events = read_events(database, job.id, after=0, limit=100_000)
    trials = [stored.trial for stored in read_trials(database, job.id, limit=100_000)]
    numbers = [trial.number for trial in trials]
    told = [event.data["trial"] for event in events if event.code in OF_A_TRIAL and "trial" in event.data]
    ends = [event for event in events if event.code.ends_job]
    found = job.answer.recommendation if job.answer is not None else None
    checks = {
        "the log has a gap or a double": [event.seq for event in events] == list(range(1, len(events) + 1)),
        "the job's last seq is not the log's": job.last_seq == len(events),
        "the log has not exactly one end": len(ends) == 1 and events[-1] is ends[0],
        "a healthy job failed": is_cancelled or job.state is JobState.SUCCEEDED,
        "the answer is not the stored recommendation": is_cancelled
        or (found is not None and found == job.recommendation),
        "a trial is missing or doubled": numbers == list(range(len(numbers))),
        "an event of a trial is missing or doubled": told == numbers,
    }
    return [f"{job.id}: {what} ({job.state}, {job.error})" for what, holds in checks.items() if not holds]
