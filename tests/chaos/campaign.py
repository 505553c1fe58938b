"""A campaign: jobs, faults at random, and the checks afterwards."""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from storage.database import Database, DatabaseLimits, open_database
from storage.jobs import Job, get_job
from storage.schema import upgrade
from tests.chaos.clients import Clients
from tests.chaos.databases import ChaosDatabase, PostgresServer, SqliteFile
from tests.chaos.faults import Faults
from tests.chaos.invariants import violations_of
from tests.chaos.processes import Service
from tests.chaos.result import Result, read_commit

DRAIN_SECONDS = 180.0
OK = {0, -signal.SIGTERM}
"""A process that is told to end before it listens to signals is ended by the signal."""


@dataclass(frozen=True)
class Plan:
    """How long and how hard a campaign hurts a service.

    Attributes:
        seconds: how long faults begin.
        fault_seconds: the mean pause between the beginnings of two faults.
        num_workers: of the service.
        num_trials: of a job.
        num_cancels: running jobs that are cancelled afterwards, when nothing is hurt, to take their time.
        postgres: on PostgreSQL (pgserver) instead of SQLite.
        port: of the API; null: any.
    """

    seconds: float
    seed: int
    fault_seconds: float = 1.6
    num_workers: int = 2
    num_trials: int = 12
    num_cancels: int = 5
    postgres: bool = False
    port: int | None = None


def run_campaign(plan: Plan) -> Result:
    """Hurt a service, let it finish its jobs, and check them."""
    with tempfile.TemporaryDirectory(prefix="bexp-chaos-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL runs as a user of its own
        database: ChaosDatabase = PostgresServer(folder) if plan.postgres else SqliteFile(folder)
        result = Result(read_commit(), "PostgreSQL" if plan.postgres else "SQLite", plan.seed)
        try:
            opened = open_database(database.url, DatabaseLimits())
            upgrade(opened)
            service = Service(database.url, folder, plan.num_workers, plan.port)
            try:
                _run(plan, database, opened, service, result)
            finally:
                statuses = service.end()
            result.violations += [f"a worker ended with status {status}" for status in statuses if status not in OK]
            result.violations += [f"logged: {line}" for line in service.complaints()]
            if orphans := service.orphans():
                result.violations.append(f"{orphans} orphans")
            opened.dispose()
        finally:
            database.close()
    return result


def _run(plan: Plan, database: ChaosDatabase, opened: Database, service: Service, result: Result) -> None:
    rng = Random(plan.seed)
    clients = Clients(service, opened, Random(rng.random()), num_trials=plan.num_trials, open_jobs=2 * plan.num_workers)
    faults = Faults(service, database, rng)
    clients.await_start()
    started = time.monotonic()
    clients.start()
    try:
        while time.monotonic() - started < plan.seconds:
            faults.hurt()
            pause_ends = time.monotonic() + rng.uniform(0.1, 1.9) * plan.fault_seconds
            while (left := pause_ends - time.monotonic()) > 0:
                faults.tend()
                time.sleep(min(left, 0.1))
    finally:
        faults.end()
        clients.stop()
    result.faults = dict(faults.counts)
    _drain(clients, service, result)
    result.seconds = round(time.monotonic() - started, 1)
    result.exits = dict(service.exits)
    clients.await_start()
    for _ in range(plan.num_cancels):
        seconds = clients.time_cancel()
        if seconds is None:
            result.violations.append("a job did not start, though nothing was hurt")
        else:
            result.cancel_seconds.append(round(seconds, 2))
    _check(clients, opened, result)


def _drain(clients: Clients, service: Service, result: Result) -> None:
    """Let every job end, without further faults."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while time.monotonic() < deadline:
        service.tend()
        clients.note_finished()
        if not clients.open:
            return
        time.sleep(0.2)
    result.violations += [f"{job_id}: not finished in {DRAIN_SECONDS:g} s without faults" for job_id in clients.open]


def _check(clients: Clients, opened: Database, result: Result) -> None:
    if len(set(clients.job_ids.values())) < len(clients.job_ids):
        result.violations.append("two keys made one job")
    answers: dict[int, set[str]] = {}
    for job_id in sorted(clients.finished):
        job = get_job(opened, job_id)
        result.violations += violations_of(opened, job, may_be_cancelled=job_id in clients.cancelled)
        result.jobs += 1
        result.attempts += job.attempt
        result.most_attempts_of_a_job = max(result.most_attempts_of_a_job, job.attempt)
        if job_id in clients.cancelled:
            result.cancelled_jobs += 1
        else:
            answers.setdefault(_seed(job), set()).add(_answer(job))
    result.different_answers = sum(len(found) - 1 for found in answers.values())


def _seed(job: Job) -> int:
    assert job.request is not None
    return job.request.seed


def _answer(job: Job) -> str:
    return "none" if job.recommendation is None else job.recommendation.candidate.describe()
