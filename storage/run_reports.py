"""Reports of real runs, kept beside the answer of the exploration that they are about."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from explorer.records.run_report import RunReport
from storage.database import Database
from storage.jobs import get_job, select_row
from storage.tables import run_reports

MAX_REPORTS = 1000
"""The most reports that one exploration keeps."""


@dataclass(frozen=True, slots=True)
class StoredRunReport:
    """A report, its place in the order of storing, which is the page cursor, and when it was stored."""

    seq: int
    received_at: datetime
    report: RunReport


class NoAnswerError(ValueError):
    """The exploration has recommended nothing that a run could have followed."""


class TooManyReportsError(ValueError):
    """The exploration has `MAX_REPORTS` reports already."""


def insert_run_report(database: Database, job_id: str, report: RunReport) -> StoredRunReport:
    """Store a report.

    Raises:
        JobNotFoundError: there is no such exploration.
        NoAnswerError: it has no recommendation.
        TooManyReportsError: it has as many reports as it keeps.
    """
    job = get_job(database, job_id)
    best = job.recommendation if job.answer is None else job.answer.recommendation
    if best is None:
        raise NoAnswerError(f"exploration {job_id} has recommended nothing yet")
    document = report.model_dump(mode="json")
    with database.begin() as connection:
        select_row(connection, job_id, lock=True)  # keeps the numbers of two writers apart
        last = sa.select(sa.func.max(run_reports.c.seq)).where(run_reports.c.job_id == job_id)
        seq = (connection.scalar(last) or 0) + 1
        if seq > MAX_REPORTS:
            raise TooManyReportsError(f"exploration {job_id} has {MAX_REPORTS} run reports already")
        now = database.now(connection)
        connection.execute(sa.insert(run_reports).values(job_id=job_id, seq=seq, at=now, report=document))
    return StoredRunReport(seq, now, report)


def read_run_reports(
    database: Database, job_id: str, *, after: int = 0, limit: int = MAX_REPORTS
) -> list[StoredRunReport]:
    """Return the reports with `seq` > `after`, in the order of storing, at most `limit`."""
    query = (
        sa.select(run_reports)
        .where(run_reports.c.job_id == job_id, run_reports.c.seq > after)
        .order_by(run_reports.c.seq)
        .limit(limit)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [StoredRunReport(row.seq, row.at, RunReport.model_validate(row.report)) for row in rows]
