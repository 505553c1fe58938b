"""Counts over the whole database, for monitoring."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa

from explorer.records.measurement import Outcome
from storage.database import Database
from storage.jobs import JobState
from storage.tables import jobs, trials
from storage.workers import LIVE_WITHIN, select_workers


@dataclass(frozen=True, slots=True)
class Statistics:
    """Every state and every outcome has an entry; a device kind, and a target with its version, have
    one while a worker that has it lives.
    """

    jobs_by_state: dict[JobState, int]
    oldest_queued_seconds: float
    workers_by_device_kind: dict[str, int]
    workers_by_target: dict[tuple[str, str], int]
    trials_by_outcome: dict[Outcome, int]


def read_statistics(database: Database, *, live_within: timedelta = LIVE_WITHIN) -> Statistics:
    """Count jobs, live workers and trials."""
    with database.read() as connection:
        states = _count(connection, jobs.c.state)
        outcomes = _count(connection, trials.c.outcome)
        oldest = connection.scalar(
            sa.select(sa.func.min(jobs.c.queued_at)).where(jobs.c.state == JobState.QUEUED.value)
        )
        age = 0.0 if oldest is None else max(0.0, (database.now(connection) - oldest).total_seconds())
        live = select_workers(database, connection, live_within=live_within)
    trials_by_outcome = dict.fromkeys(Outcome, 0)
    for stored, number in outcomes.items():
        trials_by_outcome[Outcome(stored)] += number
    return Statistics(
        jobs_by_state={state: states.get(state.value, 0) for state in JobState},
        oldest_queued_seconds=age,
        workers_by_device_kind=dict(Counter(worker.info.device_kind for worker in live)),
        workers_by_target=dict(Counter(item for worker in live for item in worker.info.targets.items())),
        trials_by_outcome=trials_by_outcome,
    )


def _count(connection: sa.Connection, column: sa.Column[str]) -> dict[str, int]:
    rows = connection.execute(sa.select(column, sa.func.count()).group_by(column))
    return {row[0]: row[1] for row in rows}
