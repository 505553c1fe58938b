"""A campaign: jobs, faults at random, and the checks afterwards."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import sqlalchemy as sa

from bexp.storage.database import DATABASE_TROUBLE, Database, DatabaseLimits, open_database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState, get_job
from bexp.storage.schema import upgrade
from bexp.storage.tables import jobs
from bexp.storage.trials import read_trials
from tests.chaos.clients import Clients
from tests.chaos.crowd import OPEN_STATES, OWNERS, Crowd
from tests.chaos.databases import ChaosDatabase, PostgresServer, SqliteFile
from tests.chaos.failpoints import OF_CALLS, OF_JOBS, Failpoints, list_edges
from tests.chaos.faults import Faults
from tests.chaos.invariants import is_given_up, violations_of
from tests.chaos.processes import TABLES, Service
from tests.chaos.promises import Stored, broken_promises, read_stored
from tests.chaos.result import Result, read_commit
from tests.chaos.searches import MEASURED_SEEDS
from tests.chaos.undisturbed import Outcome, UndisturbedSearches

STALL_SECONDS = 120.0
"""Jobs are stuck if none of them adds to its log for so long. A slow machine delays them, and does not stop them."""

DRAIN_SECONDS = 1800.0
JOBS_OF_A_WORKER = 3
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
        measures: whether a tenth of the jobs are measured by a real profiler process.
        postgres: on PostgreSQL (pgserver) instead of SQLite.
    """

    seconds: float
    seed: int
    fault_seconds: float = 0.15
    num_workers: int = 8
    cold_share: float = 0.02
    num_trials: int = 24
    trial_seconds: float = 0.05
    num_cancels: int = 5
    measures: bool = True
    postgres: bool = False


def run_campaign(plan: Plan, ending: threading.Event | None = None) -> Result:
    """Hurt a service, let it finish its jobs, and check them. `ending` ends the faults early."""
    with tempfile.TemporaryDirectory(prefix="bexp-chaos-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL runs as a user of its own
        database: ChaosDatabase = PostgresServer(folder) if plan.postgres else SqliteFile(folder)
        result = Result(read_commit(), "PostgreSQL" if plan.postgres else "SQLite", plan.seed)
        try:
            opened = open_database(database.url, DatabaseLimits())
            upgrade(opened)
            service = Service(
                database.url,
                folder,
                plan.num_workers,
                plan.cold_share,
                plan.trial_seconds,
                require_token=True,
                failpoints_folder=folder / "failpoints",
                tables=TABLES,
                measures=plan.measures,
            )
            try:
                failpoints = Failpoints(folder / "failpoints", Random(plan.seed))
                _run(plan, database, opened, service, failpoints, result, ending)
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


def _run(
    plan: Plan,
    database: ChaosDatabase,
    opened: Database,
    service: Service,
    failpoints: Failpoints,
    result: Result,
    ending: threading.Event | None,
) -> None:
    rng = Random(plan.seed)
    crowd = Crowd(
        service, opened, Random(rng.random()), num_trials=plan.num_trials, open_jobs=JOBS_OF_A_WORKER * plan.num_workers
    )
    with closing(Clients(service, opened, Random(rng.random()), crowd.headers[OWNERS[0]])) as clients:
        faults = Faults(service, database, opened, rng, failpoints, crowd.await_write)
        clients.await_start()
        started = time.monotonic()
        crowd.start()
        try:
            while time.monotonic() - started < plan.seconds and not (ending and ending.is_set()):
                mean = plan.fault_seconds if faults.hurt() else MISSED_SECONDS
                pause_ends = time.monotonic() + rng.uniform(0.1, 1.9) * mean
                while (left := pause_ends - time.monotonic()) > 0:
                    faults.tend()
                    time.sleep(min(left, 0.1))
        finally:
            faults.end()
            crowd.stop()
            service.tend()  # which notes an API that has just been killed
        result.faults = dict(faults.counts)
        result.faults_during_jobs = faults.num_during_jobs + failpoints.num_struck(OF_JOBS)
        result.faults_during_calls = failpoints.num_struck(OF_CALLS)
        result.failpoints, result.edges = dict(failpoints.struck), len(list_edges())
        result.calls = dict(Counter(call.operation for call in crowd.history.calls))
        if _check(crowd, opened, service, failpoints, result):
            return  # what is left could take for ever
        _drain(opened, service, result)
        result.seconds = round(time.monotonic() - started, 1)
        clients.await_start()
        service.note_answer(service.api)
        crowd.show_all()
        _check(crowd, opened, service, failpoints, result)
        for _ in range(plan.num_cancels):
            seconds = clients.time_cancel()
            if seconds is None:
                result.violations.append("a job did not start, or its cancel did not end it, though nothing was hurt")
                break
            result.cancel_seconds.append(round(seconds, 2))


def _drain(opened: Database, service: Service, result: Result) -> None:
    """Let every job end, without further faults."""
    started = moved = time.monotonic()
    seen: object = None
    is_open = jobs.c.state.in_(OPEN_STATES)
    progress: Sequence[object] = ()
    while (now := time.monotonic()) - moved < STALL_SECONDS and now - started < DRAIN_SECONDS:
        service.tend()
        with suppress(*DATABASE_TROUBLE), opened.read() as connection:
            progress = connection.execute(sa.select(jobs.c.id, jobs.c.last_seq).where(is_open)).all()
            if not progress:
                return
        if progress != seen:
            seen, moved = progress, now
        time.sleep(0.2)
    left = f"not finished {time.monotonic() - started:.0f} s after the last fault"
    result.violations += [f"{row}: {left}" for row in progress]


def _read_stored(opened: Database) -> dict[str, Stored]:
    """Read when the database answers: a process that is frozen in a commit holds SQLite's file until it goes on."""
    ends_at = time.monotonic() + STALL_SECONDS
    while True:
        try:
            return read_stored(opened)
        except DATABASE_TROUBLE:
            if time.monotonic() > ends_at:
                raise
        time.sleep(0.2)


def _check(crowd: Crowd, opened: Database, service: Service, failpoints: Failpoints, result: Result) -> bool:
    """Judge all calls, and the jobs that have ended by now; return whether a promise is broken."""
    frozen = [[since, until] for pid, since, until in failpoints.frozen if pid in service.api_pids]
    service.disturbances += [times for times in frozen if times not in service.disturbances]
    stored = _read_stored(opened)
    found = broken_promises(crowd.history, stored, service.was_disturbed)
    calls_of = crowd.history.of_jobs()
    undisturbed = UndisturbedSearches()
    ended = [job for job_id in sorted(stored) if (job := get_job(opened, job_id)).state.is_final]
    for job in ended:
        asked = Counter(call.operation for call in calls_of.get(job.id, ()))
        found += violations_of(opened, job, num_resumes=asked["resume"], num_cancels=asked["cancel"])
        differs = difference_of(opened, job, undisturbed)
        found += [f"{job.id}: it differs from the search without faults: {differs}"] if differs else []
    result.jobs = len(ended)
    result.measured_jobs = sum(job.request is not None and job.request.seed in MEASURED_SEEDS for job in ended)
    result.violations += found
    return bool(found)


def difference_of(opened: Database, job: Job, undisturbed: UndisturbedSearches) -> str:
    """Return how a job differs from the search without faults, of which one that was ended has gone a part."""
    if job.request is None:
        return "its request cannot be read"
    if job.request.seed in MEASURED_SEEDS:
        return ""  # a clock tells other figures each time
    expected = undisturbed.outcome_of(job.request)
    trials = (each.trial for each in read_trials(opened, job.id, limit=1000))
    found = Outcome.of(trials, read_events(opened, job.id, limit=100_000), job.recommendation)
    is_part = job.state is JobState.CANCELLED or is_given_up(job)
    is_alike = found.begins(expected) if is_part else found == expected
    return "" if is_alike else "; ".join(found.differences(expected))
