"""Fuzzes the REST API in process: `python -m tests.chaos.fuzz --examples 20000 --processes 2`.

Each process calls an application of its own through ASGI. A request that reaches lines which no earlier one has reached
joins the corpus that later ones are changed from (Python 3.12 and later report lines at no cost: `sys.monitoring`).
The result is JSON, written again every 20 s, so that little is lost with a process that is killed. SIGTERM ends the
requests. The status is 1 if an answer was a server error, if it took more than a second of processor time or 30 s, or
if memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any
from urllib.parse import unquote

import psutil
import sqlalchemy as sa

from bexp.api.app import create_app
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database, open_database
from bexp.storage.queue import Queue
from bexp.storage.schema import upgrade
from bexp.storage.tables import jobs
from tests.chaos.fuzz_inputs import UNKNOWN_ID, Request, draw, seeds
from tests.chaos.processes import ROOT
from tests.chaos.result import read_commit, write_document
from tests.contracts.samples import make_progress, make_report, make_request, make_worker

MOST_CPU_SECONDS = 1.0
MOST_SECONDS = 30.0
"""More than processor time, because the host may be busy with something else; for that reason the service may take
longer than usual, too."""

MOST_GROWTH_BYTES = 50 << 20
WARM_UP = 500
"""Requests after which memory is measured for the first time, when caches are filled."""

CLEAN_UP = 1000
"""Requests after which the explorations that were accepted are deleted, and the result is written."""

MEMORY_EVERY = 5000
WRITE_SECONDS = 20.0

MAX_CORPUS = 1000
MAX_KEPT_BYTES = 4000
OWN_FOLDERS = tuple(str(ROOT / name) for name in ("api", "explorer", "storage"))


@dataclass
class Found:
    """What a process found.

    `seconds` counts answers by their time, rounded to two digits. `memory_bytes` is the resident memory after the
    warm-up, and again after each MEMORY_EVERY requests.
    """

    requests: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    corpus: int = 0
    guided: bool = False
    slowest_seconds: float = 0.0
    most_cpu_seconds: float = 0.0
    slowest: str = ""
    seconds: dict[str, int] = field(default_factory=dict)
    memory_bytes: list[int] = field(default_factory=list)
    growth_bytes: int = 0
    violations: list[str] = field(default_factory=list)


class Lines:
    """Counts the lines of the service's own code that are reached for the first time."""

    def __init__(self) -> None:
        self.num_new = 0
        self._monitoring: Any = getattr(sys, "monitoring", None)
        if self._monitoring is not None:
            tool, lines = self._monitoring.COVERAGE_ID, self._monitoring.events.LINE
            self._monitoring.use_tool_id(tool, "bexp-fuzz")
            self._monitoring.register_callback(tool, lines, self._note)
            self._monitoring.set_events(tool, lines)

    @property
    def is_guiding(self) -> bool:
        """Whether this Python reports lines."""
        return self._monitoring is not None

    def close(self) -> None:
        """Watch no more."""
        if self._monitoring is not None:
            self._monitoring.set_events(self._monitoring.COVERAGE_ID, 0)
            self._monitoring.free_tool_id(self._monitoring.COVERAGE_ID)

    def take(self) -> int:
        """Return the number of new lines since the last call."""
        number, self.num_new = self.num_new, 0
        return number

    def _note(self, code: CodeType, _: int) -> Any:
        self.num_new += code.co_filename.startswith(OWN_FOLDERS)
        return self._monitoring.DISABLE


async def call(app: Any, request: Request) -> int:
    """Return the status of the answer; a stream is left after its first part."""
    sent = False
    status = 0
    answered = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answered.set()

    headers = [(b"host", b"127.0.0.1"), (b"content-length", str(len(request.body)).encode())]
    headers += [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in request.headers]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(request.path, errors="replace"),
        "raw_path": request.path.encode(),
        "query_string": request.query.encode(),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    try:
        await app(scope, receive, send)
    except Exception:  # noqa: BLE001 - Starlette raises what it has answered with a 500 once more
        status = status or 500
    return status


async def fuzz(examples: int, seed: int, folder: Path, seconds: float) -> Found:
    """Send so many requests, or as many as `seconds` allow, or as many as come before SIGTERM.

    What was found so far is written to `part_file` after each CLEAN_UP requests.
    """
    url = f"sqlite:///{folder / f'fuzz-{seed}.db'}"
    database = open_database(url)
    upgrade(database)
    known = _make_job(database)
    found, rng, lines, process = Found(), Random(seed), Lines(), psutil.Process()
    found.guided = lines.is_guiding
    app = create_app(ServiceSettings(url, is_open=True, answer_seconds=2 * MOST_SECONDS))
    ends_at = time.monotonic() + seconds
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with _running(app):
        corpus = seeds(
            [(method, path) for path, item in app.openapi()["paths"].items() for method in map(str.upper, item)]
        )
        ids = (known, UNKNOWN_ID)
        while found.requests < examples and time.monotonic() < ends_at and not stopped.is_set():
            number = found.requests
            request = corpus[number] if number < len(corpus) and number < 100 else draw(rng, corpus)
            sent = Request(request.method, request.path.replace("{id}", rng.choice(ids)), *_rest(request))
            answered = await _timed(app, sent)
            found.requests += 1
            _judge(found, sent, answered)
            if lines.take() and number >= 100 and len(corpus) < MAX_CORPUS and len(request.body) <= MAX_KEPT_BYTES:
                corpus.append(request)
            if found.requests == WARM_UP or found.requests % MEMORY_EVERY == 0:
                found.memory_bytes.append(process.memory_info().rss)
            if found.requests % CLEAN_UP == 0:
                with database.begin() as connection:
                    connection.execute(sa.delete(jobs).where(jobs.c.id != known))
                _close(found, corpus, process)
                _write_part(found, part_file(folder, seed))
    lines.close()
    _close(found, corpus, process)
    database.dispose()
    return found


def part_file(folder: Path, seed: int) -> Path:
    """The file with what the process of this seed has found so far."""
    return folder / f"part-{seed}.json"


def _close(found: Found, corpus: list[Request], process: psutil.Process) -> None:
    """Note what is known at the end, or now."""
    found.corpus = len(corpus)
    if found.memory_bytes:
        found.growth_bytes = process.memory_info().rss - found.memory_bytes[0]


def _write_part(found: Found, path: Path) -> None:
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(asdict(found)))
    whole.replace(path)


@dataclass(frozen=True)
class Answered:
    """The status of an answer, and what it took. Nothing else runs in the process meanwhile."""

    status: int
    seconds: float
    cpu_seconds: float


async def _timed(app: Any, sent: Request) -> Answered:
    start, cpu_start = time.perf_counter(), time.process_time()
    status = await call(app, sent)
    return Answered(status, time.perf_counter() - start, time.process_time() - cpu_start)


def _judge(found: Found, sent: Request, answered: Answered) -> None:
    status, rounded = str(answered.status), f"{answered.seconds:.1e}"
    found.statuses[status] = found.statuses.get(status, 0) + 1
    found.seconds[rounded] = found.seconds.get(rounded, 0) + 1
    found.most_cpu_seconds = max(found.most_cpu_seconds, answered.cpu_seconds)
    if answered.seconds > found.slowest_seconds:
        found.slowest_seconds, found.slowest = answered.seconds, sent.describe()
    if answered.status >= 500 or answered.status == 0:
        found.violations.append(f"status {answered.status}: {sent.describe()}")
    elif answered.cpu_seconds > MOST_CPU_SECONDS or answered.seconds > MOST_SECONDS:
        taken = f"{answered.seconds:.2f} s, {answered.cpu_seconds:.2f} s of processor time"
        found.violations.append(f"{taken}: {sent.describe()}")


def _make_job(database: Database) -> str:
    """Return the id of a running job with a recommendation."""
    work = Queue(database)
    job, _ = work.enqueue(make_request())
    claim = work.claim(make_worker(fingerprint=make_report().hardware.fingerprint))
    assert claim is not None
    work.pin(claim.lease, make_report())
    work.record(claim.lease, make_progress(0))
    return job.id


@asynccontextmanager
async def _running(app: Any) -> AsyncIterator[None]:
    async with app.router.lifespan_context(app):
        yield


def _rest(request: Request) -> tuple[str, tuple[tuple[str, str], ...], bytes]:
    return request.query, request.headers, request.body


def _stop_processes(*_: object) -> None:
    """Pass SIGTERM on to the processes that fuzz. They end early, and what they found is added up as usual."""
    for process in multiprocessing.active_children():
        process.terminate()


def _run(arguments: tuple[int, int, str, float]) -> Found:
    examples, seed, folder, seconds = arguments
    return asyncio.run(fuzz(examples, seed, Path(folder), seconds))


def add_up(parts: list[Found]) -> dict[str, object]:
    """Return what all processes found as a JSON document."""
    statuses: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for part in parts:
        statuses.update(part.statuses)
        taken.update(part.seconds)
    slowest = max(parts, key=lambda part: part.slowest_seconds)
    grown = max(parts, key=lambda part: part.growth_bytes)
    growth = grown.growth_bytes
    violations = [text for part in parts for text in part.violations]
    if growth > MOST_GROWTH_BYTES:
        violations.append(f"the memory of a process grew by {growth / 2**20:.0f} MiB")
    return {
        "commit": read_commit(),
        "processes": len(parts),
        "requests": sum(part.requests for part in parts),
        "guided_by_new_lines": all(part.guided for part in parts),
        "corpus": sum(part.corpus for part in parts),
        "statuses": dict(sorted(statuses.items())),
        "median_seconds": _percentile(taken, 0.5),
        "p99_9_seconds": _percentile(taken, 0.999),
        "slowest_seconds": round(slowest.slowest_seconds, 4),
        "slowest": slowest.slowest,
        "most_cpu_seconds": round(max(part.most_cpu_seconds for part in parts), 4),
        "largest_memory_growth_bytes": growth,
        "memory_bytes_of_that_process": grown.memory_bytes,
        "num_violations": len(violations),
        "violations": violations[:50],
    }


def _percentile(taken: Counter[str], share: float) -> float | None:
    """Return the time that `share` of the answers did not exceed, in two digits; null if there are none."""
    rank, seen = share * taken.total(), 0
    for seconds in sorted(taken, key=float):
        seen += taken[seconds]
        if seen > rank:
            return float(seconds)
    return None


def _read_parts(folder: Path) -> list[Found]:
    return [Found(**json.loads(path.read_text())) for path in sorted(folder.glob("part-*.json"))]


def main() -> int:
    """Fuzz, write the result, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=20_000, help="of all processes together")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one on each core that is allowed"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="end earlier than after all examples")
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: standard output")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    share = -(-options.examples // options.processes)
    with tempfile.TemporaryDirectory(prefix="bexp-fuzz-") as folder:
        work = [(share, seed + index, folder, 60 * options.minutes) for index in range(options.processes)]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            signal.signal(signal.SIGTERM, _stop_processes)
            running = pool.map_async(_run, work, chunksize=1)
            while not running.ready():
                running.wait(WRITE_SECONDS)
                if options.output is not None and (parts := _read_parts(Path(folder))):
                    write_document(add_up(parts), options.output)
            document = add_up(running.get())
    return write_document(document, options.output)


if __name__ == "__main__":
    sys.exit(main())
