"""Components that explorations have measured, kept so that later ones on the same hardware and versions reuse them.

A row is one run of one component. It names neither the exploration, nor who asked for it, nor the model. `subject` and
`component` are hashes of what was measured (`bexp.explorer.search.component_subjects`). `environment` is a hash of the
hardware and the software. `source` separates the runs of different explorations.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport, EarlierRun, EarlierRuns
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.component_subjects import component_subjects, subject_of
from bexp.storage.database import Database
from bexp.storage.tables import components

MAX_AGE = timedelta(days=90)
"""Older rows are deleted; too much on a machine changes in that time."""
MAX_ROWS = 50_000
"""The most rows that are kept, the newest; a row takes about 0.8 kB."""
MAX_RUNS = 2
"""The newest runs of a component that an exploration reuses."""
MAX_REUSED = 500
"""The most runs of all components that an exploration reuses."""
MAX_VERSIONS_NAMED = 3


def keep_components(
    database: Database,
    job_id: str,
    request: ExplorationRequest,
    report: DeviceReport,
    software: Mapping[str, str],
    trials: Iterable[Trial],
) -> int:
    """Keep the last run of each component that the trials of a job measured; return how many are kept.

    They replace what was kept of the job before. Rows that are too old or too many are deleted.
    """
    source, environment = _digest(job_id)[:16], _environment(report.hardware, software)
    values = {
        "source": source,
        "environment": environment,
        "device": report.hardware.device_name,
        "versions": _describe(report.hardware, software),
    }
    subjects = component_subjects(request, report)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for measurement in (m for trial in trials for m in trial.measurement.components):
        subject = subject_of(measurement.component, subjects)
        if subject is not None and measurement.contamination is None:
            document = measurement.model_dump(mode="json", exclude_defaults=True, exclude={"conditions"})
            key = (subject, _digest(measurement.component.key)[:32])
            rows[key] = {**values, "subject": subject, "component": key[1], "measurement": document}
    if not rows:
        return 0
    try:
        with database.begin() as connection:
            now = database.now(connection)
            connection.execute(sa.delete(components).where(components.c.source == source))
            connection.execute(sa.insert(components), [{**row, "at": now} for row in rows.values()])
            _drop_old(connection, now)
    except sa.exc.IntegrityError:  # a worker that has lost this job keeps the same runs at this moment
        return 0
    return len(rows)


def _drop_old(connection: sa.Connection, now: datetime) -> None:
    connection.execute(sa.delete(components).where(components.c.at < now - MAX_AGE))
    newest = sa.select(components.c.at).order_by(components.c.at.desc()).offset(MAX_ROWS).limit(1)
    too_old = connection.scalar(newest)
    if too_old is not None:
        connection.execute(sa.delete(components).where(components.c.at <= too_old))


def find_earlier_runs(
    database: Database, request: ExplorationRequest, report: DeviceReport, software: Mapping[str, str]
) -> EarlierRuns:
    """Return the runs that an exploration may reuse, and the number of runs of other versions on such a device.

    A request for fresh measurements reuses none; neither does one that compares samplers.
    """
    subjects = list(component_subjects(request, report).values())
    if request.fresh or request.sampler != "bexp" or not subjects:
        return EarlierRuns()
    environment = _environment(report.hardware, software)
    here = components.c.subject.in_(subjects)
    newest_first = sa.select(components).where(here, components.c.environment == environment)
    newest_first = newest_first.order_by(components.c.at.desc(), components.c.source).limit(MAX_REUSED)
    others = (
        sa.select(components.c.versions, sa.func.count(), sa.func.max(components.c.at).label("last"))
        .where(here, components.c.environment != environment, components.c.device == report.hardware.device_name)
        .group_by(components.c.versions)
        .order_by(sa.desc("last"))
    )
    with database.read() as connection:
        now = database.now(connection)
        rows = connection.execute(newest_first).all()
        ignored = connection.execute(others).all()
    runs, sources = _read(rows, now)
    return EarlierRuns(
        runs=tuple(runs),
        num_explorations=len(sources),
        num_ignored=sum(number for _, number, _ in ignored),
        other_versions=tuple(versions for versions, _, _ in ignored[:MAX_VERSIONS_NAMED]),
    )


def prune_components(database: Database, *, older_than: timedelta | None = None) -> int:
    """Delete the components that were measured longer ago, all by default; return the number of rows."""
    with database.begin() as connection:
        delete = sa.delete(components)
        if older_than is not None:
            delete = delete.where(components.c.at < database.now(connection) - older_than)
        return connection.execute(delete).rowcount


def _read(rows: Sequence[sa.Row[Any]], now: datetime) -> tuple[list[EarlierRun], set[str]]:
    """Return the newest runs of each component, oldest first, and their sources, without unreadable rows."""
    counts = Counter[tuple[str, str]]()
    runs: list[EarlierRun] = []
    sources: set[str] = set()
    for row in rows:
        key = (row.subject, row.component)
        if counts[key] >= MAX_RUNS:
            continue
        try:
            measurement = ComponentMeasurement.model_validate(row.measurement)
        except ValidationError:  # another version stored it
            continue
        counts[key] += 1
        sources.add(row.source)
        runs.append(EarlierRun(measurement=measurement, age_seconds=max(0.0, (now - row.at).total_seconds())))
    return runs[::-1], sources


def _environment(hardware: HardwareSpec, software: Mapping[str, str]) -> str:
    versions = "|".join(f"{name}={version}" for name, version in sorted(software.items()))
    return _digest(f"{hardware.fingerprint}|{versions}")[:16]


def _describe(hardware: HardwareSpec, software: Mapping[str, str]) -> str:
    driver = [] if hardware.versions.driver is None else [f"driver {hardware.versions.driver}"]
    torch = hardware.describe().partition("GiB, ")[2]
    return ", ".join([torch, *driver, *(f"{name} {version}" for name, version in sorted(software.items()))])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
