"""Stored answers to the same request, measured on the same hardware with the same versions.

A job is answered when it is submitted, if a live worker has the hardware and versions of the answer. Else it is
answered when such a worker takes it. Either way it is a job of its own, with the submitter's labels and key, and with a
log that ends. It stays if the exploration that measured the answer is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from bexp.explorer.cost.step import memory_limit
from bexp.explorer.model.hardware import SoftwareVersions
from bexp.explorer.model.target import BEXP, describe_target
from bexp.explorer.records.event import EventCode, EventDraft, end_event, recommendation_event
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest, request_key
from bexp.storage.database import Database
from bexp.storage.jobs import Job, JobState, job_from_row
from bexp.storage.matching import MEMORY_TOLERANCE, find_takers, needs_of
from bexp.storage.tables import jobs, run_reports
from bexp.storage.workers import WorkerInfo, select_live

_COPIED = (
    *("fingerprint", "report", "device_name", "space", "answer"),
    *("micro_batch_size", "performance", "tokens_per_second", "rate_unit", "confidence"),
    *("devices_needed", "software", "request_key"),
)
_MOST_TRIED = 5
_IN_FINGERPRINT = frozenset(SoftwareVersions.model_fields)


@dataclass(frozen=True, slots=True)
class Offer:
    """The means by which a worker would measure a request: hardware, versions, number of devices, and their memory."""

    fingerprint: str
    software: str
    devices_needed: int
    memory_limit_bytes: int

    @classmethod
    def of(cls, request: ExplorationRequest, by: WorkerInfo) -> Offer:
        """Return the offer of a worker for a request that it can run."""
        software = software_of(request.target_name, by.targets, by.versions)
        return cls(by.fingerprint, software, request.devices.needed(by.num_devices), by.memory_limit_bytes)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer to reuse: a job's columns from it, the events that announce it, and its recommendation."""

    values: Mapping[str, Any]
    drafts: tuple[EventDraft, ...]
    recommendation: Recommendation


def software_of(target: str, targets: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """Return the software with which a worker measures one of its targets, as a text with versions.

    `targets` has the version of each target by name, and `versions` that of each package. Versions that the fingerprint
    of the hardware contains are left out.
    """
    measured = [(name, targets[name]) for name in sorted({BEXP, target}) if name in targets]
    others = [(name, version) for name, version in sorted(versions.items()) if name not in {*targets, *_IN_FINGERPRINT}]
    return ", ".join(describe_target(name, version) for name, version in (*measured, *others))


def find_answer_of_live(database: Database, request: ExplorationRequest, owner: str) -> StoredAnswer | None:
    """Return a stored answer to an owner's request, measured with the means of a live worker; None without one."""
    if request.fresh:
        return None
    with database.read() as connection:
        live = select_live(database, connection)
    takers = find_takers(SimpleNamespace(**needs_of(request), own_worker=""), live)
    return find_answer(database, request, owner, {Offer.of(request, worker) for worker in takers})


def find_answer(
    database: Database, request: ExplorationRequest, owner: str, offers: Iterable[Offer]
) -> StoredAnswer | None:
    """Return the newest stored answer to a request that one of the offers would measure alike; None if there is none.

    The answer must belong to the `owner` of the request, because nobody learns what others have measured.

    An exploration answers if it measured and succeeded. Its confidence must reach the target of the request, unless its
    search for that target ended by its own rule. The offered memory must be about that of the measurement, and the
    recommendation must fit. After a later report of a real run by the owner, the answer is out of date and not reused.
    """
    offers = tuple(offers)
    key = request_key(request)
    measured_alike = [
        sa.and_(
            jobs.c.fingerprint == offer.fingerprint,
            jobs.c.software == offer.software,
            jobs.c.devices_needed == offer.devices_needed,
        )
        for offer in offers
    ]
    if request.fresh or key is None or not measured_alike:
        return None
    same = jobs.alias()
    reported_since = (
        sa.select(sa.literal(1))
        .where(
            same.c.id == run_reports.c.job_id,
            same.c.request_key == key,
            same.c.owner == owner,
            run_reports.c.at > jobs.c.finished_at,
        )
        .correlate(jobs)
        .exists()
    )
    query = (
        sa.select(jobs)
        .where(
            jobs.c.request_key == key,
            jobs.c.owner == owner,
            jobs.c.state == JobState.SUCCEEDED.value,
            jobs.c.reused_from.is_(None),
            jobs.c.serves_up_to >= request.budget.confidence_target,
            sa.or_(*measured_alike),
            ~reported_since,
        )
        .order_by(jobs.c.finished_at.desc(), jobs.c.id.desc())
        .limit(_MOST_TRIED)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
    for row in rows:
        job = job_from_row(row)
        measured_with = (row.fingerprint, row.software, row.devices_needed)
        alike = (o for o in offers if (o.fingerprint, o.software, o.devices_needed) == measured_with)
        if job.unreadable is None and any(_has_room(job, request, offer.memory_limit_bytes) for offer in alike):
            return _stored_answer(job, row, request.budget.confidence_target)
    return None


def _has_room(job: Job, request: ExplorationRequest, limit_bytes: int) -> bool:
    """Return whether a stored answer also holds with such a limit of the device's memory."""
    best = job.recommendation
    if job.report is None or best is None:
        return False
    hardware = job.report.hardware
    measured = memory_limit(request, hardware)
    offered = memory_limit(request, hardware.model_copy(update={"memory_limit_bytes": limit_bytes}))
    required = max(best.required_bytes, best.for_batch.required_bytes)
    return required <= offered and abs(offered - measured) <= MEMORY_TOLERANCE * measured


def _stored_answer(job: Job, row: sa.Row[Any], confidence_target: int) -> StoredAnswer | None:
    best = job.recommendation
    if job.answer is None or best is None or job.finished_at is None:
        return None
    values = {name: getattr(row, name) for name in _COPIED}
    values |= {"reused_from": job.id, "measured_at": job.finished_at}
    said = EventDraft(
        code=EventCode.ANSWERED,
        message=f"Answered from exploration {job.id} of {job.finished_at.astimezone(UTC):%Y-%m-%d %H:%M} GMT: the same "
        "request on the same hardware and versions. Ask with fresh=true to measure again",
        data={"exploration": job.id, "measured_at": job.finished_at.isoformat()},
    )
    drafts = (said, recommendation_event(best), end_event(job.answer, confidence_target))
    return StoredAnswer(values, drafts, best)
