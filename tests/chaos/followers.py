"""Followers of many explorations, who lose their connection again and again, also because the API is killed."""

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
"""Within which an event has to reach those who are connected (99% of them)."""

STALL_SECONDS = 120.0
RETRY_SECONDS = 0.3


@dataclass
class Follower:
    """What one follower has got: the number of each event, when it came, and since when its connection was there."""

    job_id: str
    seen: list[int] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    disconnects: int = 0


def follow_jobs(service: Service, database: Database, num_followers: int) -> dict[str, Any]:
    """Write the events of the explorations, kill the API, and check what each follower got."""
    queue = Queue(database, QueueSettings(lease=timedelta(hours=1)))
    leases = []
    for _ in range(NUM_JOBS):
        queue.enqueue(make_request(device_kind="cuda"))
        claim = queue.claim(make_worker("w", device_kind="cuda"))
        assert claim is not None
        leases.append(claim.lease)
    followers = [Follower(leases[number % NUM_JOBS].job_id) for number in range(num_followers)]
    begun: dict[tuple[str, int], float] = {}
    writer = threading.Thread(target=_write, args=(queue, leases, service, begun), daemon=True)
    started = time.monotonic()
    writer.start()
    asyncio.run(_follow_all(service.port, followers, writer))
    writer.join()
    last = {lease.job_id: get_summary(database, lease.job_id).last_seq for lease in leases}
    wrong = [f"{f.job_id}: a follower got {f.seen}" for f in followers if f.seen != list(range(1, last[f.job_id] + 1))]
    waits = spread(list(_waits(followers, begun, connected=True)))
    return {
        "followers": num_followers,
        "explorations": NUM_JOBS,
        "events": sum(len(follower.seen) for follower in followers),
        "disconnects": sum(follower.disconnects for follower in followers),
        "restarts": service.exits.get("api -9", 0),
        "seconds": round(time.monotonic() - started, 1),
        "connected": waits,
        "all": spread(list(_waits(followers, begun, connected=False))),
        "violations": wrong + above("p99 of an event of one who is connected", waits["p99"], LIMIT_SECONDS),
    }


def _waits(
    followers: Sequence[Follower], begun: Mapping[tuple[str, int], float], *, connected: bool
) -> Iterator[float]:
    """Yield how long after its write began each event came; `connected`: only into connections that were there."""
    for follower in followers:
        for seq, (came, since) in zip(follower.seen, follower.times, strict=True):
            at = begun.get((follower.job_id, seq))
            if at is not None and (since < at or not connected):
                yield came - at


def _write(queue: Queue, leases: Sequence[Lease], service: Service, begun: dict[tuple[str, int], float]) -> None:
    """Write events at an even pace and end the explorations; kill the API in between. Note when each write began."""
    pause = SECONDS / NUM_EVENTS / 2
    for number in range(NUM_EVENTS):
        for lease in leases:
            at = time.monotonic()
            seq = _insist(queue, lease, EventDraft(code=EventCode.WARNING, message=f"event {number}"))
            begun[lease.job_id, seq] = at
        time.sleep(pause)
        if number * NUM_RESTARTS % NUM_EVENTS < NUM_RESTARTS:
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


async def _follow_all(port: int, followers: Sequence[Follower], writer: threading.Thread) -> None:
    rng = Random(0)
    tasks = [asyncio.create_task(_follow(port, follower, Random(rng.random()))) for follower in followers]
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


async def _follow(port: int, follower: Follower, rng: Random) -> None:
    """Read the events to the end; come back after each lost connection, and lose some on purpose."""
    now = time.monotonic()
    leaves = sorted((now + rng.uniform(0.0, SECONDS) for _ in range(NUM_DISCONNECTS)), reverse=True)
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
        ends, since = False, time.monotonic()
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
                follower.times.append((time.monotonic(), since))
            ends = ends or line.startswith(b"event: cancelled")
            if ends and line in {b"\n", b"\r\n"}:
                return True
    finally:
        writer.close()
