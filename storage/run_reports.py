"""Reports of real runs, kept with the exploration whose answer they follow."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.run_report import ReportedRun, RunReport
from bexp.explorer.search.reported_runs import is_same_training, summarize_reports
from bexp.storage.database import Database
from bexp.storage.jobs import Job, get_job, job_from_row, select_row
from bexp.storage.quotas import check_stored, find_quota
from bexp.storage.tables import jobs, run_reports

MAX_REPORTS = 1000
"""The most reports that one exploration keeps."""
MAX_EXPLORATIONS = 50
"""The most explorations whose reports one search uses."""


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
        StoredQuotaError: the owner stores as much as its quota allows.
    """
    job = get_job(database, job_id)
    if job.recommendation is None:
        raise NoAnswerError(f"exploration {job_id} has recommended nothing yet")
    document = report.model_dump(mode="json")
    with database.begin() as connection:
        check_stored(database, connection, job.owner, find_quota(connection, job.owner))
        select_row(connection, job_id, lock=True)  # keeps the numbers of two writers apart
        last = sa.select(sa.func.max(run_reports.c.seq)).where(run_reports.c.job_id == job_id)
        seq = (connection.scalar(last) or 0) + 1
        if seq > MAX_REPORTS:
            raise TooManyReportsError(f"exploration {job_id} has {MAX_REPORTS} run reports already")
        now = database.now(connection)
        connection.execute(sa.insert(run_reports).values(job_id=job_id, seq=seq, at=now, report=document))
        connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(stored_bytes=None))
    return StoredRunReport(seq, now, report)


def find_reported_runs(database: Database, job: Job, report: DeviceReport) -> tuple[ReportedRun, ...]:
    """Return the real runs of earlier explorations of the same model on such hardware, the newest first.

    The target must have the same version. The exploration must have the same owner, because anybody can write anything
    into a report. At most `MAX_EXPLORATIONS` explorations count.
    """
    if job.request is None:
        return ()
    reported = sa.select(run_reports.c.job_id).distinct()
    earlier = (
        sa.select(jobs)
        .where(
            jobs.c.id.in_(reported),
            jobs.c.id != job.id,
            jobs.c.owner == job.owner,
            jobs.c.fingerprint == report.hardware.fingerprint,
            jobs.c.target == job.request.target_name,
        )
        .order_by(jobs.c.created_at.desc(), jobs.c.id.desc())
        .limit(MAX_EXPLORATIONS)
    )
    with database.read() as connection:
        rows = connection.execute(earlier).all()
        documents = connection.execute(
            sa.select(run_reports.c.job_id, run_reports.c.report).where(run_reports.c.job_id.in_([r.id for r in rows]))
        ).all()
    summaries: list[ReportedRun] = []
    for row in rows:
        other = job_from_row(row)
        if (
            other.recommendation is None
            or other.request is None
            or other.report is None
            or not is_same_training(job.request, other.request)
            or _version(other.report) != _version(report)
        ):
            continue
        reports = [RunReport.model_validate(document) for job_id, document in documents if job_id == other.id]
        summaries += summarize_reports(other.id, other.recommendation, other.report.hardware, reports)
    return tuple(summaries)


def _version(report: DeviceReport) -> str | None:
    return None if report.parts is None else report.parts.measured


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
