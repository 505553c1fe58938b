"""Judges the history of a campaign's calls, and what is stored in the end, against what the service promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import sqlalchemy as sa

from bexp.explorer.records.event import EventCode
from bexp.storage.database import Database
from bexp.storage.tables import events, jobs, labels, run_reports
from tests.chaos.history import Call, History, named

ANSWER_SECONDS = 5.0
"""As promised. `tests.chaos.figures` measures how long answers take when nothing is hurt."""

LATE_SECONDS = 20.0
"""After so long, a cancelled exploration does not succeed, not even if its worker and its database were away."""

EXPECTED = {
    "submit": {201, 202, 422, 503},
    "get": {200, 404, 503},
    "peek": {404, 503},
    "list": {200, 503},
    "cancel": {200, 202, 404, 503},
    "resume": {202, 404, 409, 503},
    "delete": {204, 404, 409, 503},
    "report": {201, 404, 409, 503},
}
"""By operation: the statuses that an answer may have, also in the middle of faults."""

Disturbed = Callable[[float, float], bool]
"""Whether the API was killed, frozen or starting between two times."""


@dataclass(frozen=True)
class Stored:
    """What the database holds of an exploration in the end. `created` and `finished` are seconds since 1970."""

    id: str
    owner: str
    state: str
    key: str | None
    created: float
    finished: float | None
    reports: Sequence[int]
    has_failed: bool = False
    """Whether it was ended so at some time, even if somebody has resumed it since."""


def read_stored(database: Database) -> dict[str, Stored]:
    """Return all explorations by id; a run report is told by its number of steps."""
    reports: dict[str, list[int]] = {}
    with database.read() as connection:
        for row in connection.execute(sa.select(run_reports)):
            reports.setdefault(row.job_id, []).append(row.report["steps"])
        of_label = (labels.c.job_id == jobs.c.id) & (labels.c.key == "key")
        failed = set(connection.scalars(sa.select(events.c.job_id).where(events.c.code == EventCode.FAILED)))
        rows = connection.execute(sa.select(jobs, labels.c.value).select_from(jobs.outerjoin(labels, of_label))).all()
    return {
        row.id: Stored(
            row.id,
            row.owner,
            row.state,
            row.value,
            row.created_at.timestamp(),
            None if row.finished_at is None else row.finished_at.timestamp(),
            reports.get(row.id, []),
            row.id in failed,
        )
        for row in rows
    }


def broken_promises(history: History, stored: Mapping[str, Stored], disturbed: Disturbed) -> list[str]:
    """Return a line for each promise that was broken."""
    by_job = history.of_jobs()
    found = [*_of_answers(history.calls, disturbed), *_of_keys(history, stored, by_job)]
    for job_id, calls in by_job.items():
        now = stored.get(job_id)
        found += [f"{job_id}: {text}" for text in (*_of_presence(calls, now), *_of_cancels(calls, now))]
        found += [f"{job_id}: {text}" for text in (*_of_content(calls), *_of_reports(calls, now))]
    return found


def _of_answers(calls: Sequence[Call], disturbed: Disturbed) -> Iterator[str]:
    """Each request is answered, in time, and with a status that fits it, unless the API itself was struck."""
    for call in calls:
        if call.operation == "prune":
            continue
        if call.status is not None and call.status not in EXPECTED[call.operation]:
            yield f"an unexpected answer: {call.describe()}"
        elif (call.status is None or call.seconds > ANSWER_SECONDS) and not disturbed(call.started, call.ended):
            yield f"no answer within {ANSWER_SECONDS:g} s: {call.describe()}"


def _of_keys(history: History, stored: Mapping[str, Stored], by_job: Mapping[str, Sequence[Call]]) -> Iterator[str]:
    """A key of an owner stands for one request and one exploration, until that is cancelled, fails or is deleted."""
    by_key: dict[tuple[str, str], list[Call]] = {}
    for call in named(history.calls, "submit"):
        by_key.setdefault((call.owner, str(call.key)), []).append(call)
    for (owner, key), calls in by_key.items():
        yield from _of_lists(by_job, stored, owner, key, [call for call in history.calls if call.listed is not None])
        born = {job.id: job.created for job in stored.values() if (job.owner, job.key) == (owner, key)}
        for call in calls:
            if call.seen is not None:
                born.setdefault(call.seen.id, call.ended)
                if (call.seen.owner, call.seen.labels.get("key"), call.seen.seed) != (owner, key, call.number):
                    yield f"the key was answered with another request: {call.describe()}"
            others = (other for other in calls if other.number != call.number and other.started < call.ended)
            if call.status == 422 and not any(other.may_be_done for other in others):
                yield f"the key was used for no other request: {call.describe()}"
        ordered = sorted(born, key=born.__getitem__)
        for first, second in pairwise(ordered):
            ends = named(by_job.get(first, ()), "cancel", "delete", "prune")
            until = max([born[second], *(c.ended for c in calls if c.seen is not None and c.seen.id == second)])
            has_failed = first in stored and stored[first].has_failed
            if not has_failed and not any(call.may_be_done and call.started < until for call in ends):
                yield f"{key} of {owner} made two explorations, {first} and {second}"


def _of_lists(
    by_job: Mapping[str, Sequence[Call]], stored: Mapping[str, Stored], owner: str, key: str, lists: Sequence[Call]
) -> Iterator[str]:
    """A list by a label has the owner's explorations with it, and no other.

    Whose an exploration is, an answer or the database says; nobody says it of one that was deleted unanswered.
    """
    of_others = {job.id for job in stored.values() if (job.owner, job.key) != (owner, key)}
    told: dict[str, float] = {}
    for job_id, calls in by_job.items():
        ends = [c.ended for c in calls if c.seen and (c.seen.owner, c.seen.labels.get("key")) == (owner, key)]
        told |= {job_id: min(ends)} if ends else {}
        of_others |= {job_id} if not ends and any(c.seen for c in calls) else set()
    for call in lists:
        assert call.listed is not None
        if (call.owner, call.key) != (owner, key):
            continue
        for job_id in told.keys() - call.listed:
            deletions = named(by_job[job_id], "delete", "prune")
            if told[job_id] < call.started and not any(d.may_be_done and d.started < call.ended for d in deletions):
                yield f"{job_id} is not in the list of its label: {call.describe()}"
        if strangers := call.listed & of_others:
            yield f"{sorted(strangers)} are in the list of another label or owner: {call.describe()}"


def _of_presence(calls: Sequence[Call], now: Stored | None) -> Iterator[str]:
    """What was accepted is there until somebody deletes it, and then no more."""
    deletions = [call for call in named(calls, "delete", "prune") if call.may_be_done]
    told = min(call.ended for call in calls if call.seen is not None) if any(c.seen for c in calls) else None
    if now is None and told is not None and not deletions:
        yield "it was accepted, and is not stored"
    gone = min((call.ended for call in deletions if call.is_done and call.operation == "delete"), default=None)
    if now is not None and gone is not None:
        yield "it was deleted, and is stored"
    for call in named(calls, "get", "cancel", "resume", "delete", "report"):
        may_be_gone = any(deletion.started < call.ended for deletion in deletions if deletion is not call)
        if call.status == 404 and told is not None and told < call.started and not may_be_gone:
            yield f"nobody has deleted it: {call.describe()}"
        if call.is_done and gone is not None and gone < call.started:
            yield f"it was deleted before: {call.describe()}"


def _of_cancels(calls: Sequence[Call], now: Stored | None) -> Iterator[str]:
    """What was cancelled stays cancelled, unless its search ended just then or somebody has resumed it."""
    resumes = [call for call in named(calls, "resume") if call.may_be_done]
    for cancel in named(calls, "cancel"):
        if cancel.seen is None:
            continue
        later = [resume for resume in resumes if resume.ended > cancel.started]
        for call in calls:
            seen = call.seen
            if seen is None or call.started < cancel.ended or any(resume.started < call.ended for resume in later):
                continue
            if not (seen.is_final or seen.cancel_requested) or (
                cancel.seen.state == "cancelled" and seen.state != "cancelled"
            ):
                yield f"the cancel was lost: it is {seen.state} after {cancel.describe()}"
        if now is None or later or now.finished is None:
            continue
        if now.state == "succeeded" and now.finished > cancel.ended + LATE_SECONDS:
            yield f"it succeeded {now.finished - cancel.ended:.1f} s after its cancel"


def _of_content(calls: Sequence[Call]) -> Iterator[str]:
    """An exploration that has succeeded never changes; each answer shows it so."""
    shown = [call for call in calls if call.seen is not None and call.seen.state == "succeeded"]
    if len({call.seen.content for call in shown if call.seen is not None}) > 1:
        yield f"it changed after it had succeeded: {shown[0].describe()}, {shown[-1].describe()}"
    first = min((call.ended for call in shown), default=float("inf"))
    for call in calls:
        if call.seen is not None and call.started > first and call.seen.state != "succeeded":
            yield f"it had succeeded, and is {call.seen.state}: {call.describe()}"


def _of_reports(calls: Sequence[Call], now: Stored | None) -> Iterator[str]:
    """An accepted run report is stored once, one without an answer at most once."""
    if now is None:
        return
    for call in named(calls, "report"):
        times = now.reports.count(call.number)
        if times > 1 or (call.is_done and not times) or (times and not call.may_be_done):
            yield f"the run report is stored {times} times: {call.describe()}"
