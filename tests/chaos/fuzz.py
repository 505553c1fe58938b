"""Fuzzes the REST API over sockets: `python -m tests.chaos.fuzz --requests 1000000 --minutes 50 --output FILE`.

A service of its own process answers connections that are kept, each with several requests at a time, of owners with
tokens and quotas. A worker in this process claims and ends explorations meanwhile. Each request is a valid one, or one
with one change. The result is JSON, a round of FILE: SIGTERM ends it cleanly, and several may run side by side. The
status is 1 if an answer was a server error other than 503, was late, was not as the OpenAPI document says, named
another owner, or was accepted where it had to be refused; if the service logged an error; or if its memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.records.event import Progress
from bexp.explorer.records.recommendation import Answer as SearchAnswer
from bexp.explorer.records.recommendation import VariantAnswer
from bexp.storage.database import DATABASE_TROUBLE, Database, open_database
from bexp.storage.jobs import JobState
from bexp.storage.leases import LeaseLostError
from bexp.storage.owners import USUAL_SCOPES, Scope
from bexp.storage.pruning import find_prunable, prune
from bexp.storage.queue import Queue
from bexp.storage.quotas import Quota, set_quota
from bexp.storage.schema import upgrade
from bexp.storage.tokens import create_token
from bexp.storage.workers import register_worker
from tests.chaos.databases import PostgresServer, SqliteFile
from tests.chaos.fuzz_answers import Answer, Connection, Judge
from tests.chaos.fuzz_changes import Request, Tenant
from tests.chaos.fuzz_requests import CANCEL, DELETE, RESUME, SUBMIT, Requests
from tests.chaos.processes import ROOT
from tests.chaos.result import read_commit, write_document
from tests.chaos.rounds import add_rounds
from tests.contracts.samples import make_progress, make_recommendation, make_report, make_worker
from tests.waits import PATIENCE_SECONDS, wait_until

NUM_CONNECTIONS = 8
PIPELINED = (1, 1, 2, 4, 8)
MOST_GROWTH_BYTES = 50 << 20
WARM_UP = 5000
"""Requests after which memory is measured for the first time, when caches are filled."""
WATCH_SECONDS = 20.0
KEPT_JOBS = 200
QUOTAS = {"owner-tight": Quota(max_queued=3), "owner-full": Quota(max_stored_bytes=1)}
OWNERS = ("owner-red", "owner-blue", *QUOTAS)


class Fuzz:
    """Sends requests and counts what came of them."""

    def __init__(self, port: int, document: dict[str, Any], database: Database, seed: int) -> None:
        self._port = port
        self._rng = Random(seed)
        self._seed = seed
        self._started = time.monotonic()
        self._commit = read_commit()
        self._database = database
        self._tenants = [_make_tenant(database, name) for name in OWNERS]
        admin = Tenant(
            "owner-admin", {"usual": create_token(database, "admin", owner="owner-admin", scopes=list(Scope))}
        )
        admin.tokens |= {"lesser": self._tenants[0].tokens["usual"], "expired": self._tenants[0].tokens["expired"]}
        self._requests = Requests(document, self._tenants, admin, self._rng)
        self._judge = Judge(document, self._tenants)
        self._worker = Worker(database, {tenant.name: tenant for tenant in self._tenants}, self._rng)
        self._statuses: Counter[int] = Counter()
        self._seconds: Counter[float] = Counter()
        self._slowest = (0.0, "")
        self._ended = asyncio.Event()
        self.violations: dict[str, list[str]] = {}
        self.memory_bytes: list[int] = []

    async def run(self, num: int, seconds: float, note: Callable[[], None]) -> None:
        """Send so many requests, or as many as the time allows, or as come before SIGTERM; `note` is called often."""
        with suppress(NotImplementedError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._ended.set)
        until = self._started + seconds
        works = [self._converse(num, until) for _ in range(NUM_CONNECTIONS)]
        beside = [asyncio.create_task(each) for each in (self._work(), self._watch(note))]
        await asyncio.gather(*works)
        self._ended.set()
        await asyncio.gather(*beside)

    @property
    def num(self) -> int:
        """How many requests were answered."""
        return self._seconds.total()

    async def _converse(self, num: int, until: float) -> None:
        connection = Connection(self._port)
        while self.num < num and time.monotonic() < until and not self._ended.is_set():
            requests: list[Request] = []
            for _ in range(self._rng.choice(PIPELINED)):
                requests.append(self._requests.draw())
                if requests[-1].is_stream or requests[-1].raw is not None:
                    requests[:-1] = [] if requests[-1].raw is not None else requests[:-1]
                    break
            for request, answer in zip(requests, await connection.exchange(requests), strict=False):
                self._note(request, answer)
        await connection.close()

    def _note(self, request: Request, answer: Answer) -> None:
        self._statuses[answer.status] += 1
        self._seconds[float(f"{answer.seconds:.1e}")] += 1
        if answer.seconds > self._slowest[0]:
            self._slowest = (answer.seconds, request.describe())
        for fault in self._judge.faults_of(request, answer):
            self.violations.setdefault(fault, []).append(request.describe())
        if request.tenant is None or not (200 <= answer.status < 300 or answer.status == 404):
            return
        if request.route == SUBMIT:
            request.tenant.move(json.loads(answer.body)["id"], request.tenant.open)
        elif request.job_id is not None and (request.route == DELETE or answer.status == 404):
            request.tenant.move(request.job_id, None)
        elif request.job_id is not None and request.route in {CANCEL, RESUME}:
            tenant = request.tenant
            tenant.move(request.job_id, tenant.open if request.route == RESUME else tenant.ended)

    async def _work(self) -> None:
        while not self._ended.is_set():
            with suppress(*DATABASE_TROUBLE, LeaseLostError):
                await asyncio.to_thread(self._worker.act)
            await asyncio.sleep(0.02)

    async def _watch(self, note: Callable[[], None]) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), WATCH_SECONDS)
            note()

    def found(self) -> dict[str, Any]:
        """Return the result so far."""
        seconds = time.monotonic() - self._started
        growth = self.memory_bytes[-1] - self.memory_bytes[0] if self.memory_bytes else 0
        grown = [f"memory grew by {growth / 2**20:.0f} MiB"] if growth > MOST_GROWTH_BYTES else []
        violations = [f"{len(of)} times: {fault}: {of[0]}" for fault, of in self.violations.items()] + grown
        return {
            "commit": self._commit,
            "database": self._database.engine.dialect.name,
            "seed": self._seed,
            "requests": self.num,
            "seconds": round(seconds, 1),
            "requests_a_second": round(self.num / seconds, 1),
            "accepted_share": round(
                sum(n for status, n in self._statuses.items() if 200 <= status < 300) / max(1, self.num), 3
            ),
            "statuses": {str(status): self._statuses[status] for status in sorted(self._statuses)},
            "median_seconds": self._percentile(0.5),
            "p99_9_seconds": self._percentile(0.999),
            "slowest_seconds": round(self._slowest[0], 4),
            "slowest": self._slowest[1],
            "memory_growth_bytes": growth,
            "num_violations": sum(map(len, self.violations.values())) + len(grown),
            "violations": violations[:50],
        }

    def _percentile(self, share: float) -> float | None:
        rank, seen = share * self.num, 0
        for seconds in sorted(self._seconds):
            seen += self._seconds[seconds]
            if seen > rank:
                return seconds
        return None


class Worker:
    """Claims explorations and does with them what workers do, an exploration a call."""

    def __init__(self, database: Database, tenants: dict[str, Tenant], rng: Random) -> None:
        self._database = database
        self._queue = Queue(database)
        self._tenants = tenants
        self._rng = rng
        self._acts = 0

    def act(self) -> None:
        """Take the next exploration, and answer it, or leave it running, or put it back, or let it fail."""
        rng, report = self._rng, make_report()
        device, targets = rng.choice(("cpu", "cuda")), {"bexp": "1", "transformers": "5"}
        if device == "cuda":
            report = make_report("A GPU", "cuda")
        if rng.random() < 0.5:  # the others are as a version would store them whose back ends have other names
            report = report.model_copy(update={"expert_backends": (BackendSupport(name="loop", usable=True),)})
        limit = report.hardware.memory_limit_bytes
        info = make_worker(
            f"w-{device}",
            device,
            num_devices=8,
            fingerprint=report.hardware.fingerprint,
            targets=targets,
            memory_limit_bytes=limit,
        )
        self._acts += 1
        if self._acts % 50 == 1:
            register_worker(self._database, info)
            prune(self._database, find_prunable(self._database, keep=KEPT_JOBS))
        claim = self._queue.claim(info)
        if claim is None:
            return
        self._queue.pin(claim.lease, report)
        self._queue.record(claim.lease, make_progress(len(claim.history)))
        tenant = self._tenants[claim.job.owner]
        match rng.choice(("answer",) * 6 + ("fault", "fail", "release", "leave")):
            case "answer":
                best = make_recommendation().model_copy(update={"confidence": 99})
                variant = VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=best)
                last = Progress(recommendation=best, answer=SearchAnswer(variants=(variant,)))
                self._queue.finish(claim.lease, JobState.SUCCEEDED, last=last)
                tenant.move(claim.job.id, tenant.answered)
            case "fail":
                self._queue.finish(claim.lease, JobState.FAILED, error="a fault")
                tenant.move(claim.job.id, tenant.ended)
            case "fault":
                self._queue.report_fault(claim.lease, "a fault")
            case "release":
                self._queue.release(claim.lease)
            case _:
                pass


@contextmanager
def served(database_url: str, folder: Path) -> Iterator[tuple[int, psutil.Process, Path]]:
    """Run a service; yield its port, its process and its log."""
    log = folder / "serve.log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BEXP_")}
    environment |= {"BEXP_DATABASE_URL": database_url, "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "bexp.api.cli", "serve", "--port", "0", "--require-token"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--token-rate", "0", "--address-rate", "0"], cwd=ROOT, env=environment, stderr=file
        )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := re.search(r"serving http://[\d.]+:(\d+)", log.read_text())) is None:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"the service does not start: {log.read_text()[-500:]}")
            time.sleep(0.05)
        yield int(found[1]), psutil.Process(process.pid), log
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def fuzz(num: int, seed: int, seconds: float, *, postgres: bool = False) -> dict[str, Any]:
    """Fuzz a fresh service; return the result."""
    with tempfile.TemporaryDirectory(prefix="bexp-fuzz-") as folder:
        there = PostgresServer(Path(folder)) if postgres else SqliteFile(Path(folder))
        database = open_database(there.url)
        upgrade(database)
        for owner, quota in QUOTAS.items():
            set_quota(database, owner, quota)
        with served(there.url, Path(folder)) as (port, process, log):
            described = f"http://127.0.0.1:{port}/openapi.json"
            wait_until(lambda: httpx.get(described, timeout=PATIENCE_SECONDS).is_success)  # on a busy host, later
            document = httpx.get(described, timeout=PATIENCE_SECONDS).json()
            one = Fuzz(port, document, database, seed)

            def note() -> None:
                if one.num > WARM_UP:
                    one.memory_bytes.append(process.memory_info().rss)

            asyncio.run(one.run(num, seconds, note))
        for line in log.read_text().splitlines():
            if line.startswith(("error:", "critical:", "Traceback")):
                one.violations.setdefault("the service logged an error", []).append(line)
        database.dispose()
        there.close()
        return one.found()


def _make_tenant(database: Database, owner: str) -> Tenant:
    lifetime = timedelta(seconds=-1)
    return Tenant(
        owner,
        {
            "usual": create_token(database, owner, owner=owner, scopes=USUAL_SCOPES),
            "lesser": create_token(database, f"{owner}-reads", owner=owner, scopes=[Scope.READ]),
            "expired": create_token(database, f"{owner}-expired", owner=owner, lifetime=lifetime),
        },
    )


def main() -> int:
    """Fuzz, write the result, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="end earlier than after all requests")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL (pgserver) instead of SQLite")
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--output", type=Path, help="a file that it is added to; default: standard output")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    found = fuzz(options.requests, seed, 60 * options.minutes, postgres=options.postgres)
    if options.output is None:
        return write_document(found, None)
    add_rounds(options.output, [found])
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
