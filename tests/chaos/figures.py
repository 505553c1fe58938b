"""Times what the service promises, each figure by a command: `python -m tests.chaos.figures posts [--postgres]`.

The result is JSON. It names the load of the machine, because each of these times grows with it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import sqlalchemy as sa

from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.jobs import JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.quotas import MAX_STORED_BYTES, sum_stored_bytes
from bexp.storage.schema import upgrade
from bexp.storage.tables import events, jobs
from bexp.storage.trials import read_trials
from tests.chaos.clients import Clients
from tests.chaos.databases import PostgresServer, SqliteFile
from tests.chaos.followers import follow_jobs
from tests.chaos.processes import Service
from tests.chaos.result import above, read_commit, spread, write_document
from tests.chaos.soak import soak
from tests.contracts.samples import make_progress, make_request, make_worker

NUM_FINISHED, NUM_QUEUED, NUM_CLIENTS = 10_000, 1_000, 8
POST_LIMITS_SECONDS = {"SQLite": 0.25, "PostgreSQL": 0.1}
NUM_IDLE = 1_100
HEALTH_LIMIT_SECONDS = 0.1
NUM_CROWD, NUM_PIPELINED = 300, 40
CROWD_PATHS = ("/openapi.json", "/web/charts.js", "/healthz", "/readyz", "/v1/explorations")
OTHER_USER = 65534
CROWD_LIMIT_SECONDS = 0.5
LOG_LIMIT_BYTES_A_MINUTE = 1e6
LEASE_SECONDS = QueueSettings().lease.total_seconds()
RECOVERY_LIMIT_SECONDS = LEASE_SECONDS + 5.0
RECOVERY_END_SECONDS = 4 * LEASE_SECONDS


@dataclass(frozen=True)
class Bench:
    """A service on a database of its own. `number` says how often the figure is taken."""

    service: Service
    database: Database
    clients: Clients
    kind: str
    number: int
    log: Path


@contextmanager
def open_bench(number: int, *, postgres: bool, num_workers: int) -> Iterator[Bench]:
    """Start an API and workers, and end them."""
    with tempfile.TemporaryDirectory(prefix="bexp-figures-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o711)  # PostgreSQL runs as a user of its own
        chosen = PostgresServer(folder) if postgres else SqliteFile(folder)
        stack.callback(chosen.close)
        database = open_database(chosen.url, DatabaseLimits())
        stack.callback(database.dispose)
        upgrade(database)
        service = Service(chosen.url, folder, num_workers, cold_share=0.0, lease_seconds=LEASE_SECONDS)
        stack.callback(service.end)
        clients = Clients(service, database, Random(0))
        stack.callback(clients.close)
        clients.await_start()
        kind = "PostgreSQL" if postgres else "SQLite"
        yield Bench(service, database, clients, kind, number, folder / "processes.log")


def time_posts(bench: Bench) -> dict[str, Any]:
    """Time submissions by several clients, while many explorations are stored and many wait."""
    _fill(bench.database)
    _await_notes(bench.database)
    _count_bytes(bench.database)
    seconds: list[float] = []
    statuses: set[int] = set()
    document = make_request(device_kind="cuda", fresh=True).model_dump(mode="json")

    body = json.dumps(document).encode()
    address = httpx.URL(bench.service.url)

    def submit() -> None:
        # The clients share the machine with the service, so they do little of their own.
        with closing(HTTPConnection(address.host, address.port, timeout=30)) as connection:
            for _ in range(bench.number // NUM_CLIENTS):
                start = time.perf_counter()
                connection.request("POST", "/v1/explorations", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                seconds.append(time.perf_counter() - start)
                statuses.add(answer.status)

    api = psutil.Process(bench.service.api.pid)
    used = sum(api.cpu_times()[:2])
    threads = [threading.Thread(target=submit) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = {"finished": NUM_FINISHED, "queued": NUM_QUEUED, "clients": NUM_CLIENTS, **spread(seconds)}
    told["cpu_seconds_of_one"] = round((sum(api.cpu_times()[:2]) - used) / len(seconds), 4)
    limit = POST_LIMITS_SECONDS[bench.kind]
    wrong = [] if statuses == {202} else [f"answers {sorted(statuses)}"]
    return told | {"violations": wrong + above("p99 of a submission", told["p99"], limit)}


def _fill(database: Database) -> None:
    """Copy one finished and one waiting exploration, with their logs."""
    queue = Queue(database)
    done, waits = (queue.enqueue(make_request(device_kind="cuda"))[0] for _ in range(2))
    claim = queue.claim(make_worker("w", device_kind="cuda"), among=[done.id])
    assert claim is not None
    for number in range(12):
        queue.record(claim.lease, make_progress(number))
    queue.finish(claim.lease, JobState.CANCELLED)
    for job_id, num in ((done.id, NUM_FINISHED), (waits.id, NUM_QUEUED)):
        with database.begin() as connection:
            for table, key in ((jobs, "id"), (events, "job_id")):
                found = connection.execute(sa.select(table).where(table.c[key] == job_id)).all()
                rows = [dict(row._mapping) for row in found]
                for first in range(0, num - 1, 200):
                    new = [f"{job_id[:8]}{number:08x}" for number in range(first, min(first + 200, num - 1))]
                    connection.execute(sa.insert(table), [row | {key: name} for name in new for row in rows])
    if database.is_postgresql:  # autovacuum does this within minutes, long before a service has so many
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text("VACUUM ANALYZE"))


def _await_notes(database: Database) -> None:
    """Wait until the housekeeper has noted why each exploration waits, which it does once and not in steady state."""
    unnoted = sa.select(jobs.c.id).where(jobs.c.state == JobState.QUEUED.value, jobs.c.waiting_reason.is_(None))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with database.read() as connection:
            if connection.execute(unnoted.limit(1)).first() is None:
                return
        time.sleep(0.1)
    raise TimeoutError("the housekeeper has not noted why explorations wait")


def _count_bytes(database: Database) -> None:
    """Count what each exploration takes, which a submission does once for those that have ended since the last one."""
    uncounted = sa.select(jobs.c.owner).where(jobs.c.stored_bytes.is_(None)).limit(1)
    while True:
        with database.begin() as connection:
            if (owner := connection.scalar(uncounted)) is None:
                return
            sum_stored_bytes(database, connection, owner, MAX_STORED_BYTES)


def time_health(bench: Bench) -> dict[str, Any]:
    """Time health checks while many connections are open that have sent one byte each."""
    seconds: list[float] = []
    size, start = bench.log.stat().st_size, time.monotonic()
    with ExitStack() as stack, httpx.Client(base_url=bench.service.url, timeout=30) as client:
        idle = [_half_open(bench.service.port, stack) for _ in range(NUM_IDLE)]
        for number in range(bench.number):
            begun = time.perf_counter()
            assert client.get("/healthz").is_success
            seconds.append(time.perf_counter() - begun)
            for index in range(number % 10, NUM_IDLE, 10):  # the API closes them after a while
                with suppress(BlockingIOError):
                    if not idle[index].recv(1):
                        idle[index] = _half_open(bench.service.port, stack)
            time.sleep(0.05)
    grown = 60 * (bench.log.stat().st_size - size) / (time.monotonic() - start)
    told = {"connections": NUM_IDLE, "log_bytes_a_minute": round(grown), **spread(seconds)}
    wrong = above("p99 of /healthz", told["p99"], HEALTH_LIMIT_SECONDS)
    return told | {"violations": wrong + above("the log's bytes a minute", grown, LOG_LIMIT_BYTES_A_MINUTE)}


def _half_open(port: int, stack: ExitStack) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
    connection.sendall(b"G")
    connection.setblocking(False)
    return connection


def time_beside_a_crowd(bench: Bench) -> dict[str, Any]:
    """Time lists of one user while another one asks for what needs no token, each path in turn. It needs root."""
    _fill(bench.database)
    found: dict[str, Any] = {}
    wrong: list[str] = []
    everything: list[float] = []
    for path in CROWD_PATHS:
        ended, seconds, statuses, answered = threading.Event(), list[float](), set[int](), [0]
        crowd = threading.Thread(target=_crowd, args=(bench.service.port, path, ended, answered))
        crowd.start()
        with httpx.Client(base_url=bench.service.url, timeout=60) as client:
            for _ in range(bench.number):
                begun = time.perf_counter()
                statuses.add(client.get("/v1/explorations?limit=1").status_code)
                seconds.append(time.perf_counter() - begun)
                time.sleep(0.05)
        ended.set()
        crowd.join()
        everything += seconds
        found[path] = spread(seconds) | {"crowd_received_megabytes": round(answered[0] / 1e6)}
        wrong += [] if statuses == {200} else [f"answers {sorted(statuses)} beside {path}"]
        wrong += above(f"p99 of a list beside {path}", found[path]["p99"], CROWD_LIMIT_SECONDS)
    told = {"connections": NUM_CROWD, "requests_a_connection": NUM_PIPELINED, "beside": found, "violations": wrong}
    return spread(everything) | told


def _crowd(port: int, path: str, ended: threading.Event, answered: list[int]) -> None:
    """Keep NUM_CROWD connections of another user busy with requests that are sent before the answers are read."""
    ctypes.CDLL(None).setfsuid(OTHER_USER)  # of this thread alone; it owns the sockets that are made here
    requests = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() * NUM_PIPELINED
    with ExitStack() as stack, selectors.DefaultSelector() as ready:

        def connect() -> None:
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            stack.callback(connection.close)
            connection.sendall(requests)
            connection.setblocking(False)
            ready.register(connection, selectors.EVENT_READ)

        for _ in range(NUM_CROWD):
            connect()
        while not ended.is_set():
            for key, _ in ready.select(0.1):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                received = b""
                with suppress(OSError):
                    received = connection.recv(1 << 18)
                    connection.send(requests[: len(requests) // NUM_PIPELINED])  # in place of one that was answered
                answered[0] += len(received)
                if not received:
                    ready.unregister(connection)
                    connection.close()
                    connect()


def time_recovery(bench: Bench) -> dict[str, Any]:
    """Time from the kill of a worker to the moment when another one has its exploration."""
    seconds: list[float] = []
    wrong: list[str] = []
    for _ in range(bench.number):
        job_id = bench.clients.start_long()
        while not read_trials(bench.database, job_id, limit=1):
            time.sleep(0.02)
        before = get_job(bench.database, job_id)
        owner = bench.clients.owner_of(job_id)
        (worker,) = [worker for worker in bench.service.workers if f"-{worker.pid}-" in owner]
        worker.kill()
        killed = time.monotonic()
        while (
            get_job(bench.database, job_id).attempt == before.attempt
            and time.monotonic() - killed < RECOVERY_END_SECONDS
        ):
            time.sleep(0.02)
        seconds.append(time.monotonic() - killed)
        bench.service.tend()
        bench.clients.cancel(job_id)
        numbers = [stored.trial.number for stored in read_trials(bench.database, job_id, limit=10_000)]
        wrong += [] if numbers == list(range(len(numbers))) else [f"{job_id}: a trial is stored twice, or is missing"]
    told = {"lease_seconds": LEASE_SECONDS, **spread(seconds)}
    return told | {"violations": wrong + above("the longest recovery", told["max"], RECOVERY_LIMIT_SECONDS)}


def time_cancels(bench: Bench) -> dict[str, Any]:
    """Time from the cancel of a running exploration to its end."""
    found = [bench.clients.time_cancel() for _ in range(bench.number)]
    told = spread([seconds for seconds in found if seconds is not None])
    late = [f"{found.count(None)} did not start, or did not end"] if None in found else []
    return told | {"violations": late + above("p99 of a cancel", told["p99"], 5.0)}


FIGURES: dict[str, tuple[Callable[[Bench], dict[str, Any]], int, int]] = {
    "posts": (time_posts, 1_600, 0),
    "health": (time_health, 400, 0),
    "crowd": (time_beside_a_crowd, 100, 0),
    "recovery": (time_recovery, 10, 2),
    "cancels": (time_cancels, 200, 2),
    "followers": (lambda bench: follow_jobs(bench.service, bench.database, bench.number, disturbed=True), 2000, 0),
    "events": (lambda bench: follow_jobs(bench.service, bench.database, bench.number, disturbed=False), 2000, 0),
    "soak": (lambda bench: soak(bench.service, bench.number), 60, 2),
}
"""By name: how it is taken, how often by default (followers, or minutes), and with how many workers."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.figures", description=__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--number", type=int, help="how often it is taken")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL (pgserver) instead of SQLite")
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: standard output")
    options = parser.parse_args()
    take, number, num_workers = FIGURES[options.figure]
    with open_bench(options.number or number, postgres=options.postgres, num_workers=num_workers) as bench:
        taken = take(bench)
    machine = {"cores": os.cpu_count(), "load": [round(load, 1) for load in os.getloadavg()]}
    kind = "PostgreSQL" if options.postgres else "SQLite"
    head = {"commit": read_commit(), "figure": options.figure, "database": kind, "machine": machine}
    return write_document(head | taken, options.output)


if __name__ == "__main__":
    sys.exit(main())
