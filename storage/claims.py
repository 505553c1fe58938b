"""Claims: the choice of the next job, its lease, and a stored answer in place of a measurement.

Owners take turns, and within an owner the job of the highest priority is first. The owner whose jobs hold the fewest
devices is next; among equals, the one whose last claim was longest ago. An owner with a thousand queued jobs thus
delays another by one claim at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Self

import sqlalchemy as sa
from pydantic import ValidationError

from bexp.explorer.model.target import describe_target
from bexp.explorer.records.trial import Trial
from bexp.storage.changes import change_job, claim_event, end_job, end_values, fence, has_no_worker
from bexp.storage.database import Database
from bexp.storage.events import insert_events, insert_if_changed
from bexp.storage.jobs import Job, JobState, describe_unreadable, job_from_row
from bexp.storage.leases import Claim, Lease, is_held
from bexp.storage.matching import can_run, is_left_to_gpus
from bexp.storage.queue_settings import LONGEST_PAUSE, QueueSettings
from bexp.storage.quotas import find_quota, quota_of, select_quotas
from bexp.storage.reuse import Offer, find_answer, software_of
from bexp.storage.schema import refuse_later_version
from bexp.storage.tables import IS_QUEUED, UTCDateTime, jobs, turns
from bexp.storage.trials import select_trials, trial_from_row
from bexp.storage.workers import WorkerInfo, select_live

_LOST = "in a row that ended with the worker or its device and brought no trial"


def claim_next(
    database: Database,
    settings: QueueSettings,
    by: WorkerInfo,
    *,
    description: str | None = None,
    among: Collection[str] | None = None,
    is_able: Callable[[], bool] = lambda: True,
) -> Claim | None:
    """Take the next job that a worker can run, as `Queue.claim` says.

    Raises:
        NewerSchemaError: a later version of this program has upgraded the database, and may have stored the job.
    """
    end_abandoned(database, settings, jobs.c.cancel_requested | _is_exhausted(settings))
    conditions = _claimable(database, settings, by, among)
    while True:
        with database.read() as connection:  # an idle worker takes no write lock
            next_job = find_next(database, connection, conditions)
        if next_job is None or not is_able():
            return None
        take = sa.update(jobs).where(jobs.c.id == next_job.scalar_subquery()).values(_values(database, settings, by))
        with database.begin() as connection:
            await_turn(database, connection)
            row = connection.execute(take.returning(*jobs.c)).one_or_none()
            if row is None:
                return None
            refuse_later_version(connection)  # which rolls the claim back
            if not take_turn(database, connection, row.owner):
                connection.rollback()
                continue
            measured = select_trials(connection, row.id)
            target = describe_target(row.target, by.targets[row.target])
            draft = claim_event(row.attempt, by.id, description, target, len(measured))
            insert_events(database, connection, row.id, row.last_seq, [draft])
        claim = _open(database, job_from_row(row), by.id, measured)
        if claim is not None and not _answer_from_stored(database, claim, row.owner, by):
            return claim


def end_abandoned(database: Database, settings: QueueSettings, abandoned: sa.ColumnElement[bool]) -> None:
    """End the `abandoned` jobs that nobody runs: cancelled ones, or those whose workers were lost too often."""
    conditions = [has_no_worker(database), abandoned]
    with database.read() as connection:
        rows = connection.execute(sa.select(jobs.c.id, jobs.c.cancel_requested).where(*conditions)).all()
    for row in rows:
        with database.begin() as connection:
            here = [jobs.c.id == row.id, *conditions]
            if row.cancel_requested:
                end_job(database, connection, here, JobState.CANCELLED)
            else:
                error = f"given up after {settings.max_attempts} attempts {_LOST}"
                end_job(database, connection, here, JobState.FAILED, error)


def _claimable(
    database: Database, settings: QueueSettings, by: WorkerInfo, among: Collection[str] | None
) -> Conditions:
    """Return the conditions of the jobs that the worker can take now.

    A pause that seems to last for longer than any was set before the clock was set back.
    """
    with database.read() as connection:
        live = select_live(database, connection)
    now = database.clock()
    return (
        has_no_worker(database),
        sa.not_(jobs.c.cancel_requested),
        can_run(by),
        sa.not_(is_left_to_gpus(by, live)),
        sa.not_(_is_exhausted(settings)),
        sa.or_(jobs.c.not_before.is_(None), sa.not_(jobs.c.not_before.between(now, database.clock(LONGEST_PAUSE)))),
        *([jobs.c.id.in_(among)] if among is not None else []),
    )


def _values(database: Database, settings: QueueSettings, by: WorkerInfo) -> dict[str, Any]:
    """Return the columns that a claim by the worker sets in a job."""
    return {
        "state": JobState.RUNNING.value,
        "worker": by.id,
        "attempt": jobs.c.attempt + 1,
        "lease_expires_at": database.clock(settings.lease),
        "software": _software(by),
        "started_at": sa.func.coalesce(jobs.c.started_at, database.clock(), type_=UTCDateTime()),
        "waiting_reason": None,
        "not_before": None,
        "last_seq": jobs.c.last_seq + 1,
        "version": jobs.c.version + 1,
    }


def _software(by: WorkerInfo) -> sa.ColumnElement[str | None]:
    """Return the software that measures a claimed job; None if an earlier claim had other versions."""
    own = sa.case({target: software_of(target, by.targets, by.versions) for target in by.targets}, value=jobs.c.target)
    return sa.case((sa.or_(jobs.c.attempt == 0, jobs.c.software == own), own), else_=None)


def _open(database: Database, job: Job, worker: str, measured: Sequence[sa.Row[Any]]) -> Claim | None:
    """Return the claim of a job that `worker` has just taken. If the job cannot be read, end it and return None."""
    lease = Lease(job.id, worker, job.attempt)
    history: tuple[Trial, ...] = ()
    unreadable = job.unreadable
    try:
        history = tuple(trial_from_row(row) for row in measured)
    except ValidationError as error:
        unreadable = unreadable or describe_unreadable("trial", error)
    if unreadable is not None or job.request is None:
        with database.begin() as connection:
            end_job(database, connection, fence(lease), JobState.FAILED, unreadable)
        return None
    return Claim(job, job.request, lease, history)


def _answer_from_stored(database: Database, claim: Claim, submitter: str, by: WorkerInfo) -> bool:
    """End a claimed job that has measured nothing yet with a stored answer; return whether there is one."""
    if claim.history:
        return False
    offer = Offer.of(claim.request, by)
    stored = find_answer(database, claim.request, submitter, [offer])
    if stored is None:
        return False
    values = {**stored.values, **end_values(database, JobState.SUCCEEDED, None)}
    with database.begin() as connection:  # if this worker was frozen since its claim, somebody else may have the job
        last_seq = change_job(database, connection, fence(claim.lease), stored.drafts, **values)
        if last_seq is not None:
            insert_if_changed(connection, claim.job.id, last_seq, stored.recommendation)
    return True


def _is_exhausted(settings: QueueSettings) -> sa.ColumnElement[bool]:
    return jobs.c.attempt - jobs.c.num_releases >= settings.max_attempts


HELD_BACK = "the quota of owner "
"""The beginning of a reason for waiting that no worker can change."""

_CLAIMS = int.from_bytes(b"bexptake", "big")
"""The number of PostgreSQL's advisory lock for claims."""

Conditions = Sequence[sa.ColumnElement[bool]]


@dataclass(frozen=True, slots=True)
class ClaimQuota:
    """The reason for waiting that an owner's quota gives, and whether the quota holds jobs back now."""

    reason: str
    holds: bool


def find_next(database: Database, connection: sa.Connection, conditions: Conditions) -> sa.Select[tuple[str]] | None:
    """Return the query for the id of the next job among those that meet `conditions`; it locks the job's row.

    Returns None if there is none. `connection` only reads, so that an idle worker takes no lock.
    """
    held_back = [owner for owner, quota in find_claim_quotas(database, connection).items() if quota.holds]
    if held_back:
        conditions = (*conditions, jobs.c.owner.not_in(held_back))
    if connection.execute(sa.select(jobs.c.id).where(*conditions).limit(1)).first() is None:
        return None
    held = _select_held_devices(database)
    return (
        sa.select(jobs.c.id)
        .select_from(jobs.outerjoin(held, held.c.owner == jobs.c.owner).outerjoin(turns, turns.c.owner == jobs.c.owner))
        .where(*conditions)
        .order_by(
            sa.func.coalesce(held.c.num_devices, 0),
            turns.c.claimed_at.nulls_first(),
            jobs.c.priority.desc(),
            jobs.c.created_at,
            jobs.c.id,
        )
        .limit(1)
        .with_for_update(of=jobs, skip_locked=True)
    )


def _select_held_devices(database: Database) -> sa.Subquery:
    """Return the query for the devices that the jobs of each owner hold."""
    held = sa.select(jobs.c.owner, sa.func.sum(jobs.c.devices_needed).label("num_devices"))
    return held.where(is_held(database)).group_by(jobs.c.owner).subquery("held")


def find_turns(
    database: Database, connection: sa.Connection, device_kind: str | None, among: Collection[str]
) -> dict[str, tuple[int, int]]:
    """Return the places of queued jobs in the order of claims, counted from 1, and the number of jobs in that order.

    The jobs `among` all need `device_kind`. Jobs for their own workers, and those that name another kind of device,
    are in no one's way. Each job counts as one device. Of two owners from whom no job was ever taken, the one with the
    oldest job counts as the first. A job that is not in the order itself has no place.
    """
    in_order: list[sa.TextClause | sa.ColumnElement[bool]] = [IS_QUEUED, jobs.c.own_worker == ""]
    if device_kind is not None:
        in_order.append(sa.or_(jobs.c.device_kind.is_(None), jobs.c.device_kind == device_kind))
    level = (jobs.c.owner, jobs.c.priority)  # in the order of the index of queued jobs, so that nothing is sorted
    rank = sa.func.row_number().over(partition_by=level, order_by=(jobs.c.created_at, jobs.c.id)).label("rank")
    ranked = sa.select(jobs.c.id, *level, rank).where(*in_order).subquery("ranked")
    mine = connection.execute(sa.select(ranked).where(ranked.c.id.in_(among))).all()
    number, oldest = sa.func.count().label("number"), sa.func.min(jobs.c.created_at).label("oldest")
    queued = sa.select(*level, number, oldest).where(*in_order).group_by(*level).subquery("queued")
    held = _select_held_devices(database)
    both = queued.outerjoin(held, held.c.owner == queued.c.owner).outerjoin(turns, turns.c.owner == queued.c.owner)
    served = sa.func.coalesce(held.c.num_devices, 0).label("served")
    by_owner: dict[str, list[sa.Row[Any]]] = {}
    for row in connection.execute(sa.select(queued, served, turns.c.claimed_at).select_from(both)):
        by_owner.setdefault(row.owner, []).append(row)
    owners = {owner: _QueuedOwner.of(rows) for owner, rows in by_owner.items()}
    num_queued = sum(owner.number for owner in owners.values())
    places = {}
    for job in mine:
        if (own := owners.get(job.owner)) is None:
            continue  # it was taken between the two queries
        place = ahead = job.rank + sum(row.number for row in by_owner[job.owner] if row.priority > job.priority)
        for other in owners.values():
            if other is not own:
                before = own.served + ahead - other.served - 1 + (other.waited_since < own.waited_since)
                place += min(max(before, 0), other.number)
        places[job.id] = place, num_queued
    return places


class _QueuedOwner(NamedTuple):
    """An owner of `number` queued jobs, whose running ones hold `served` devices, and since when it waits."""

    number: int
    served: int
    waited_since: tuple[bool, datetime]

    @classmethod
    def of(cls, rows: Sequence[sa.Row[Any]]) -> Self:
        """Return an owner by its rows, one for each priority."""
        number, claimed_at = sum(row.number for row in rows), rows[0].claimed_at
        waited_since = (False, min(row.oldest for row in rows)) if claimed_at is None else (True, claimed_at)
        return cls(number, rows[0].served, waited_since)


def await_turn(database: Database, connection: sa.Connection) -> None:
    """Wait until no other claim chooses: claims that choose at once would all choose the same owner.

    On SQLite the transaction holds the write lock already.
    """
    if database.is_postgresql:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CLAIMS)))


def take_turn(database: Database, connection: sa.Connection, owner: str) -> bool:
    """Note that a worker has just taken a job of `owner`; return false if its quota allows one fewer.

    The owner's row stays locked until the transaction ends, so that two claims at once do not both take the last place.
    """
    connection.execute(database.upsert(turns, {"owner": owner}, {"claimed_at": database.clock()}))
    limit = find_quota(connection, owner).max_running
    if limit is None:
        return True
    mine = sa.select(sa.func.count()).where(is_held(database), jobs.c.owner == owner)
    return connection.scalars(mine).one() <= limit


def find_claim_quotas(database: Database, connection: sa.Connection) -> dict[str, ClaimQuota]:
    """Return the quotas on running jobs, by owner: of each owner that has such a quota and active jobs."""
    quotas = select_quotas(connection)
    if all(quota.max_running is None for quota in quotas.values()):
        return {}
    held = sa.select(jobs.c.owner, sa.func.count()).where(is_held(database)).group_by(jobs.c.owner)
    running = {row[0]: row[1] for row in connection.execute(held)}
    active = jobs.c.state.in_((JobState.QUEUED.value, JobState.RUNNING.value))
    reasons = {}
    for owner in connection.scalars(sa.select(jobs.c.owner).where(active).distinct()):
        limit = quota_of(quotas, owner).max_running
        if limit is not None:
            reason = f"{HELD_BACK}'{owner}': {limit} running at a time"
            reasons[owner] = ClaimQuota(reason, running.get(owner, 0) >= limit)
    return reasons
