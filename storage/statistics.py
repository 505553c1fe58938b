"""Counts over the whole database, for monitoring."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa

from bexp.explorer.records.measurement import Outcome
from bexp.storage.claims import HELD_BACK
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.tables import jobs, trials, workers
from bexp.storage.waiting import HAS_WORKER
from bexp.storage.workers import KEEP, LIVE_WITHIN, is_live, select_live

RECENT = timedelta(hours=1)
MOST_RECENT = 1000

_ACTIVE = jobs.c.state.in_([JobState.QUEUED.value, JobState.RUNNING.value])
_HELD_BACK = jobs.c.waiting_reason.startswith(HELD_BACK)
_IS_FOR_ANY = jobs.c.own_worker == ""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of jobs, workers and trials.

    A worker that a command has started for its own exploration is not counted, and that exploration lacks no worker.
    """

    jobs_by_state: dict[JobState, int]
    """Every state has an entry."""
    num_without_worker: int
    """Jobs that no live worker can run, without those that a quota holds back."""
    num_held_back: int
    """Jobs that a quota holds back."""
    num_reused: int
    oldest_queued_seconds: float
    """The wait of the oldest queued job that no quota holds back."""
    recent_answer_seconds: list[float]
    """Seconds from submission to answer, ascending: of at most `MOST_RECENT` jobs of the last day that measured their
    answer and finished within `RECENT`.
    """
    workers_by_device_kind: dict[str, int]
    workers_by_target: dict[tuple[str, str], int]
    """Live workers by target and its version."""
    num_lost_workers: int
    """Workers that went silent within a day and did not shut down."""
    trials_by_outcome: dict[Outcome, int]
    """Every outcome has an entry."""


def read_statistics(database: Database, *, live_within: timedelta = LIVE_WITHIN) -> Statistics:
    """Count jobs, live workers and trials."""
    with database.read() as connection:
        states = _count(connection, jobs.c.state)
        outcomes = _count(connection, trials.c.outcome)
        oldest = connection.scalar(
            sa.select(sa.func.min(jobs.c.queued_at)).where(
                jobs.c.state == JobState.QUEUED.value,
                _IS_FOR_ANY,
                sa.or_(jobs.c.waiting_reason.is_(None), sa.not_(_HELD_BACK)),
            )
        )
        held_back = _number(connection, jobs, _HELD_BACK, _ACTIVE)
        lacks_worker = (jobs.c.waiting_reason.is_not(None), sa.not_(HAS_WORKER), _IS_FOR_ANY)
        without_worker = _number(connection, jobs, *lacks_worker, _ACTIVE)
        reused = _number(connection, jobs, jobs.c.reused_from.is_not(None))
        recent = _recent_answer_seconds(database, connection)
        age = 0.0 if oldest is None else max(0.0, (database.now(connection) - oldest).total_seconds())
        is_silent = sa.not_(is_live(database, live_within))
        is_known = workers.c.last_seen_at >= database.clock(-KEEP)
        lost = _number(connection, workers, is_silent, is_known, workers.c.name == "")
        live = [worker for worker in select_live(database, connection, live_within) if not worker.name]
    trials_by_outcome = dict.fromkeys(Outcome, 0)
    for stored, number in outcomes.items():
        trials_by_outcome[Outcome(stored)] += number
    return Statistics(
        jobs_by_state={state: states.get(state.value, 0) for state in JobState},
        num_without_worker=without_worker,
        num_held_back=held_back,
        num_reused=reused,
        oldest_queued_seconds=age,
        recent_answer_seconds=recent,
        workers_by_device_kind=dict(Counter(worker.device_kind for worker in live)),
        workers_by_target=dict(Counter(item for worker in live for item in worker.targets.items())),
        num_lost_workers=lost,
        trials_by_outcome=trials_by_outcome,
    )


def _count(connection: sa.Connection, column: sa.Column[str]) -> dict[str, int]:
    rows = connection.execute(sa.select(column, sa.func.count()).group_by(column))
    return {row[0]: row[1] for row in rows}


def _number(connection: sa.Connection, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> int:
    return connection.scalars(sa.select(sa.func.count()).select_from(table).where(*conditions)).one()


def _recent_answer_seconds(database: Database, connection: sa.Connection) -> list[float]:
    query = (
        sa.select(jobs.c.created_at, jobs.c.finished_at)
        .where(
            jobs.c.state == JobState.SUCCEEDED.value,
            jobs.c.created_at > database.clock(-timedelta(days=1)),
            jobs.c.finished_at > database.clock(-RECENT),
            jobs.c.reused_from.is_(None),
        )
        .order_by(jobs.c.created_at.desc())
        .limit(MOST_RECENT)
    )
    return sorted((row.finished_at - row.created_at).total_seconds() for row in connection.execute(query))
