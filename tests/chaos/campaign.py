"""A campaign: jobs, faults at random, and the checks afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import httpx

from storage.database import DATABASE_TROUBLE, Database, DatabaseLimits, open_database
from storage.jobs import Job, get_job
from storage.schema import upgrade
from tests.chaos.databases import ChaosDatabase, PostgresServer, SqliteFile
from tests.chaos.invariants import violations_of
from tests.chaos.processes import LEASE_SECONDS, ROOT, TABLE, Service
from workers.replay.recording import Recording

OPEN_JOBS = 4
START_SECONDS = 60.0
DRAIN_SECONDS = 180.0
OK = {0, -signal.SIGTERM}
"""A process that is told to end before it listens to signals is ended by the signal."""


@dataclass
class Result:
    """What a campaign did, and what it found."""

    commit: str
    database: str
    seed: int
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    jobs: int = 0
    attempts: int = 0
    most_attempts_of_a_job: int = 0
    different_answers: int = 0
    exits: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """The result, with the sum of the faults."""
        return {**asdict(self), "num_faults": sum(self.faults.values()), "lease_seconds": LEASE_SECONDS}


def run_campaign(seconds: float, *, postgres: bool, seed: int, num_workers: int = 2, num_trials: int = 12) -> Result:
    """Hurt a service for `seconds`, let it finish its jobs, and check them."""
    with tempfile.TemporaryDirectory(prefix="bexp-chaos-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL runs as a user of its own
        database: ChaosDatabase = PostgresServer(folder) if postgres else SqliteFile(folder)
        try:
            opened = open_database(database.url, DatabaseLimits())
            upgrade(opened)
            service = Service(database.url, folder, num_workers)
            try:
                campaign = _Campaign(database, opened, service, Random(seed), num_trials)
                result = Result(_commit(), "PostgreSQL" if postgres else "SQLite", seed)
                campaign.run(seconds, result)
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


class _Campaign:
    def __init__(
        self, database: ChaosDatabase, opened: Database, service: Service, rng: Random, num_trials: int
    ) -> None:
        self._database = database
        self._opened = opened
        self._service = service
        self._rng = rng
        self._faults: Counter[str] = Counter()
        self._job_ids: dict[str, str] = {}  # by idempotency key
        self._finished: set[str] = set()
        request = Recording.read(TABLE).header.request
        budget = request.budget.model_copy(
            update={"max_trials": num_trials, "confidence_target": 99, "max_seconds": 40_000.0}
        )
        self._request = request.model_copy(update={"budget": budget}).model_dump(mode="json")

    def run(self, seconds: float, result: Result) -> None:
        self._await_start()
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            self._submit()
            name, fault = self._choose()
            fault()
            self._faults[name] += 1
            self._service.tend()
            time.sleep(self._rng.uniform(0.2, 3.0))
        self._drain(result)
        result.seconds = round(time.monotonic() - started, 1)
        result.faults = dict(self._faults)
        result.exits = dict(self._service.exits)
        self._check(result)

    def _choose(self) -> tuple[str, Callable[[], None]]:
        faults: list[tuple[str, int, Callable[[], None]]] = [
            ("worker_kill", 4, self._kill_worker),
            ("worker_freeze_past_lease", 4, self._freeze_worker),
            ("api_kill", 2, self._kill_api),
            (self._database.fault, 1, lambda: self._database.hurt(self._rng)),
        ]
        name, _, fault = self._rng.choices(faults, weights=[weight for _, weight, _ in faults])[0]
        return name, fault

    def _kill_worker(self) -> None:
        worker = self._rng.choice(self._service.workers)
        worker.kill()
        worker.wait()

    def _freeze_worker(self) -> None:
        """Freeze a worker until its lease is over; meanwhile another one may take its job."""
        worker = self._rng.choice(self._service.workers)
        worker.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_SECONDS + self._rng.uniform(0.2, 2.0))
        worker.send_signal(signal.SIGCONT)

    def _kill_api(self) -> None:
        self._service.api.kill()
        self._service.api.wait()

    def _submit(self) -> None:
        """Keep some jobs open. An answer that was lost is asked for again with the same key."""
        self._note_finished()
        for number in range(len(self._finished) + OPEN_JOBS):
            key = f"key-{number}"
            if key in self._job_ids:
                continue
            with suppress(httpx.HTTPError, KeyError, ValueError):
                reply = httpx.post(
                    f"{self._service.url}/v1/explorations",
                    json={**self._request, "seed": number % 3, "fresh": True},
                    headers={"Idempotency-Key": key},
                    timeout=5,
                )
                assert reply.status_code not in {400, 409, 422}, reply.text
                if reply.status_code == httpx.codes.ACCEPTED:
                    self._job_ids[key] = reply.json()["id"]

    def _note_finished(self) -> None:
        with suppress(*DATABASE_TROUBLE):
            for job_id in set(self._job_ids.values()) - self._finished:
                if get_job(self._opened, job_id).state.is_final:
                    self._finished.add(job_id)

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self._service.url}/readyz", timeout=5).is_success:
                    return
            time.sleep(0.1)
        raise RuntimeError("the API does not start")

    def _drain(self, result: Result) -> None:
        """Let every job end, without further faults."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            self._service.tend()
            self._note_finished()
            if self._finished >= set(self._job_ids.values()):
                return
            time.sleep(0.2)
        left = set(self._job_ids.values()) - self._finished
        result.violations += [f"{job_id}: not finished in {DRAIN_SECONDS:g} s without faults" for job_id in left]

    def _check(self, result: Result) -> None:
        if len(set(self._job_ids.values())) < len(self._job_ids):
            result.violations.append("two keys made one job")
        answers: dict[int, set[str]] = {}
        for job_id in sorted(self._finished):
            job = get_job(self._opened, job_id)
            result.violations += violations_of(self._opened, job)
            result.jobs += 1
            result.attempts += job.attempt
            result.most_attempts_of_a_job = max(result.most_attempts_of_a_job, job.attempt)
            answers.setdefault(_seed(job), set()).add(_answer(job))
        result.different_answers = sum(len(found) - 1 for found in answers.values())


def _seed(job: Job) -> int:
    assert job.request is not None
    return job.request.seed


def _answer(job: Job) -> str:
    return "none" if job.recommendation is None else job.recommendation.candidate.describe()


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or os.environ.get("BEXP_COMMIT", "unknown")
