"""Followers of many explorations: which events they get, and when. Some lose connections, and the API is killed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.storage.database import DATABASE_TROUBLE, Database
from bexp.storage.jobs import JobState, get_summary
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from tests.chaos.processes import Service
from tests.chaos.result import above, spread
from tests.contracts.samples import make_request, make_worker

NUM_JOBS, NUM_EVENTS, NUM_DISCONNECTS, NUM_RESTARTS = 50, 20, 5, 20
"""Explorations, events of each, disconnects of each follower, and kills of the API."""

SECONDS = 100.0
"""How long events come."""

LIMIT_SECONDS = 1.0
"""Within which an event has to reach 99% of those who are connected."""

STALL_SECONDS = 120.0
RETRY_SECONDS = 0.3


@dataclass
class Follower:
    """What one follower has got: the number of each event, and when it came."""

    job_id: str
    seen: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    disconnects: int = 0


def follow_jobs(service: Service, database: Database, num_followers: int, *, disturbed: bool) -> dict[str, Any]:
    """Write events of the explorations, and check what each follower got.

    `disturbed`: the API is killed and followers leave. Else all are connected first, and each event is timed from the
    moment when its write begins.
    """
    queue = Queue(database, QueueSettings(lease=timedelta(hours=1)))
    leases = []
    for _ in range(NUM_JOBS):
        queue.enqueue(make_request(device_kind="cuda"))
        claim = queue.claim(make_worker("w", device_kind="cuda"))
        assert claim is not None
        leases.append(claim.lease)
    followers = [Follower(leases[number % NUM_JOBS].job_id) for number in range(num_followers)]
    begun: dict[tuple[str, int], float] = {}
    started = time.monotonic()

    def write() -> None:
        while not disturbed and not all(follower.seen for follower in followers):
            time.sleep(0.1)
        _write(queue, leases, service, begun, disturbed=disturbed)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    asyncio.run(_follow_all(service.port, followers, writer, NUM_DISCONNECTS if disturbed else 0))
    writer.join()
    last = {lease.job_id: get_summary(database, lease.job_id).last_seq for lease in leases}
    wrong = [f"{f.job_id}: a follower got {f.seen}" for f in followers if f.seen != list(range(1, last[f.job_id] + 1))]
    found = {
        "followers": num_followers,
        "explorations": NUM_JOBS,
        "events": sum(len(follower.seen) for follower in followers),
        "disconnects": sum(follower.disconnects for follower in followers),
        "restarts": service.num_kills,
        "seconds": round(time.monotonic() - started, 1),
    }
    if not disturbed:
        found |= spread(list(_waits(followers, begun)))
        wrong += above("p99 of an event", found["p99"], LIMIT_SECONDS)
    return found | {"violations": wrong}


def _waits(followers: Sequence[Follower], begun: Mapping[tuple[str, int], float]) -> Iterator[float]:
    """Yield how long after its write began each event came."""
    for follower in followers:
        for seq, came in zip(follower.seen, follower.times, strict=True):
            if (follower.job_id, seq) in begun:
                yield came - begun[follower.job_id, seq]


def _write(
    queue: Queue, leases: Sequence[Lease], service: Service, begun: dict[tuple[str, int], float], *, disturbed: bool
) -> None:
    """Write events at an even pace and end the explorations. Note when each write began."""
    pause = SECONDS / NUM_EVENTS
    for number in range(NUM_EVENTS):
        for lease in leases:
            at = time.monotonic()
            seq = _insist(queue, lease, EventDraft(code=EventCode.WARNING, message=f"event {number}"))
            begun[lease.job_id, seq] = at
        if disturbed and number * NUM_RESTARTS % NUM_EVENTS < NUM_RESTARTS:
            service.api.kill()
            service.api.wait()
            service.tend()
        time.sleep(pause)
    for lease in leases:
        queue.finish(lease, JobState.CANCELLED)


def _insist(queue: Queue, lease: Lease, draft: EventDraft) -> int:
    """Append an event and return its number; wait while the database is busy."""
    while True:
        try:
            return queue.record(lease, Progress(events=(draft,)))
        except DATABASE_TROUBLE:
            time.sleep(0.1)


async def _follow_all(port: int, followers: Sequence[Follower], writer: threading.Thread, num_disconnects: int) -> None:
    rng = Random(0)
    seeds = (rng.random() for _ in followers)
    tasks = [
        asyncio.create_task(_follow(port, one, Random(seed), num_disconnects))
        for one, seed in zip(followers, seeds, strict=True)
    ]
    moved, seen = time.monotonic(), -1
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.5)
        now = sum(len(follower.seen) for follower in followers)
        if now != seen or writer.is_alive():
            moved, seen = time.monotonic(), now
        if time.monotonic() - moved > STALL_SECONDS:
            break
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(port: int, follower: Follower, rng: Random, num_disconnects: int) -> None:
    """Read the events to the end; come back after each lost connection, and lose some on purpose."""
    now = time.monotonic()
    leaves = sorted((now + rng.uniform(0.0, SECONDS) for _ in range(num_disconnects)), reverse=True)
    while True:
        try:
            if await _read(port, follower, leaves[-1] if leaves else None):
                return
            leaves.pop()
            follower.disconnects += 1
        except (OSError, EOFError):
            await asyncio.sleep(rng.uniform(0.5, 1.5) * RETRY_SECONDS)


async def _read(port: int, follower: Follower, leave_at: float | None) -> bool:
    """Read one connection; return whether the log has ended, and not the follower left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"GET /v1/explorations/{follower.job_id}/events HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Accept: text/event-stream\r\nLast-Event-ID: {len(follower.seen)}\r\n\r\n"
        writer.write(head.encode())
        ends = False
        while True:
            patience = None if leave_at is None else max(0.0, leave_at - time.monotonic())
            try:
                line = await asyncio.wait_for(reader.readline(), patience)
            except TimeoutError:
                return False
            if not line:
                raise EOFError
            if line.startswith(b"id: "):
                follower.seen.append(int(line[4:]))
                follower.times.append(time.monotonic())
            ends = ends or line.startswith(b"event: cancelled")
            if ends and line in {b"\n", b"\r\n"}:
                return True
    finally:
        writer.close()
