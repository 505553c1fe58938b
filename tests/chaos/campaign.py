"""A campaign: jobs, faults at random, and the checks afterwards."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.jobs import JobState, get_job
from bexp.storage.schema import upgrade
from bexp.storage.trials import read_trials
from tests.chaos.clients import Clients
from tests.chaos.databases import ChaosDatabase, PostgresServer, SqliteFile
from tests.chaos.faults import Faults
from tests.chaos.invariants import violations_of
from tests.chaos.processes import Service
from tests.chaos.result import Result, read_commit
from tests.chaos.undisturbed import Outcome, UndisturbedSearches

STALL_SECONDS = 120.0
"""Jobs are stuck if none of them adds to its log for so long. A slow machine delays them, and does not stop them."""

DRAIN_SECONDS = 1800.0
MISSED_SECONDS = 0.05
"""The mean pause after a fault that could not begin."""

OK = {0, -signal.SIGTERM}
"""A process that is told to end before it listens to signals is ended by the signal."""


@dataclass(frozen=True)
class Plan:
    """How long and how hard a campaign hurts a service.

    Attributes:
        seconds: how long faults begin.
        fault_seconds: the mean pause between the beginnings of two faults.
        num_workers: of the service.
        cold_share: so many of the starts are the interpreter's, the others are forks.
        num_trials: of a job.
        trial_seconds: how long a trial takes.
        num_cancels: running jobs that are cancelled afterwards, when nothing is hurt, to take their time.
        postgres: on PostgreSQL (pgserver) instead of SQLite.
        port: of the API; null: any.
    """

    seconds: float
    seed: int
    fault_seconds: float = 1.6
    num_workers: int = 2
    cold_share: float = 0.05
    num_trials: int = 24
    trial_seconds: float = 0.0
    num_cancels: int = 5
    postgres: bool = False
    port: int | None = None


def run_campaign(plan: Plan, ending: threading.Event | None = None) -> Result:
    """Hurt a service, let it finish its jobs, and check them. `ending` ends the faults early."""
    used = _cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="bexp-chaos-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL runs as a user of its own
        database: ChaosDatabase = PostgresServer(folder) if plan.postgres else SqliteFile(folder)
        result = Result(read_commit(), "PostgreSQL" if plan.postgres else "SQLite", plan.seed)
        try:
            opened = open_database(database.url, DatabaseLimits())
            upgrade(opened)
            service = Service(database.url, folder, plan.num_workers, plan.port, plan.cold_share, plan.trial_seconds)
            try:
                _run(plan, database, opened, service, result, ending or threading.Event())
            finally:
                statuses = service.end()
            result.violations += [f"a worker ended with status {status}" for status in statuses if status not in OK]
            result.cold_starts = service.num_cold_starts
            result.violations += [f"logged: {line}" for line in service.complaints()]
            if orphans := service.orphans():
                result.violations.append(f"{orphans} orphans")
            opened.dispose()
        finally:
            database.close()
    result.cpu_seconds = round(_cpu_seconds() - used, 1)
    return result


def _cpu_seconds() -> float:
    """The CPU time of this process and of its descendants that have ended; a PostgreSQL server is none."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _run(
    plan: Plan,
    database: ChaosDatabase,
    opened: Database,
    service: Service,
    result: Result,
    ending: threading.Event,
) -> None:
    rng = Random(plan.seed)
    rng_of_clients, open_jobs = Random(rng.random()), 4 * plan.num_workers
    with closing(Clients(service, opened, rng_of_clients, num_trials=plan.num_trials, open_jobs=open_jobs)) as clients:
        faults = Faults(service, database, opened, rng)
        clients.await_start()
        started = time.monotonic()
        clients.start()
        try:
            while time.monotonic() - started < plan.seconds and not ending.is_set():
                mean = plan.fault_seconds if faults.hurt() else MISSED_SECONDS
                pause_ends = time.monotonic() + rng.uniform(0.1, 1.9) * mean
                while (left := pause_ends - time.monotonic()) > 0:
                    faults.tend()
                    time.sleep(min(left, 0.1))
        finally:
            faults.end()
            clients.stop()
        result.faults = dict(faults.counts)
        result.faults_during_jobs = faults.num_during_jobs
        _drain(clients, service, result)
        result.seconds = round(time.monotonic() - started, 1)
        result.exits = dict(service.exits)
        clients.await_start()
        for _ in range(plan.num_cancels):
            seconds = clients.time_cancel()
            if seconds is None:
                result.violations.append("a job did not start, or its cancel did not end it, though nothing was hurt")
            else:
                result.cancel_seconds.append(round(seconds, 2))
        _check(clients, opened, result)


def _drain(clients: Clients, service: Service, result: Result) -> None:
    """Let every job end, without further faults."""
    started = moved = time.monotonic()
    seen: object = None
    while (now := time.monotonic()) - moved < STALL_SECONDS and now - started < DRAIN_SECONDS:
        service.tend()
        clients.note_finished()
        if not clients.open:
            return
        progress = (len(clients.finished), dict(clients.last_seqs))
        if progress != seen:
            seen, moved = progress, now
        time.sleep(0.2)
    left = f"not finished {time.monotonic() - started:.0f} s after the last fault"
    result.violations += [f"{job_id}: {left}" for job_id in clients.open]


def _check(clients: Clients, opened: Database, result: Result) -> None:
    if len(set(clients.job_ids.values())) < len(clients.job_ids):
        result.violations.append("two keys made one job")
    undisturbed = UndisturbedSearches()
    for job_id in sorted(clients.finished):
        job = get_job(opened, job_id)
        result.violations += violations_of(opened, job, may_be_cancelled=job_id in clients.cancelled)
        result.jobs += 1
        result.attempts += job.attempt
        result.most_attempts_of_a_job = max(result.most_attempts_of_a_job, job.attempt)
        if job.state is JobState.CANCELLED:
            result.cancelled_jobs += 1
        elif job.request is not None:
            expected = undisturbed.outcome_of(job.request)
            found = Outcome.of((stored.trial for stored in read_trials(opened, job_id, limit=1000)), job.recommendation)
            if found != expected:
                result.different_answers += 1
                result.violations.append(f"{job_id}: {found}, and without faults {expected}")
