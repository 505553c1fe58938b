"""Clients that do everything at any moment, each in a thread of its own. Each call is noted with its answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any

import httpx
import sqlalchemy as sa

from bexp.storage.database import DATABASE_TROUBLE, Database
from bexp.storage.jobs import JobState
from bexp.storage.pruning import find_prunable, prune
from bexp.storage.tables import jobs
from bexp.storage.tokens import create_token
from tests.chaos.history import Call, History, Seen
from tests.chaos.processes import Service
from tests.chaos.searches import draw_seed, search_of

OWNERS = ("red", "blue")
NUM_THREADS = 4
PATIENCE_SECONDS = 12.0
"""How long a client waits, who was promised an answer in less than half of it."""
PAUSE_SECONDS = 0.1
PRUNE_PAUSE_SECONDS = 15.0
WRITE_SECONDS = 3.0
KEPT_JOBS = 12
NUM_PRUNED = 4
"""So many at a time: what is left is judged in the end."""
NUM_RECENT = 10
"""So many of the latest explorations and keys of an owner are used again."""
ASKED = {
    "get": ("GET", "", 7),
    "cancel": ("POST", "/cancel", 2),
    "resume": ("POST", "/resume", 3),
    "delete": ("DELETE", "", 1),
}
"""What is asked of one exploration: the method, the path, and how often."""
OPEN_STATES = (JobState.QUEUED.value, JobState.RUNNING.value)


class Crowd:
    """Keeps explorations open and does everything else with them, from `start` to `stop`."""

    def __init__(self, service: Service, database: Database, rng: Random, *, num_trials: int, open_jobs: int) -> None:
        self.history = History()
        self.headers = {
            owner: {"Authorization": f"Bearer {create_token(database, owner, owner=owner)}"} for owner in OWNERS
        }
        self.num_open = 0
        self._service = service
        self._database = database
        self._num_trials = num_trials
        self._open_jobs = open_jobs
        self._numbers = itertools.count(1)
        self._known: dict[str, list[str]] = {owner: [] for owner in OWNERS}
        self._keys: dict[str, list[tuple[str, int]]] = {owner: [] for owner in OWNERS}
        self._ended = threading.Event()
        self._written = threading.Event()
        self._errors: list[BaseException] = []
        works = [self._act] * NUM_THREADS + [self._watch, self._prune]
        self._threads = [threading.Thread(target=self._keep, args=(work, Random(rng.random()))) for work in works]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; raise what went wrong here."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for error in self._errors:
            raise error

    def await_write(self) -> None:
        """Return just after somebody was told that something is written, or after some seconds without that."""
        self._written.clear()
        self._written.wait(WRITE_SECONDS)

    def show_all(self) -> None:
        """Get every exploration that anybody was told of, when nothing is hurt any more."""
        owner_of = {seen.id: seen.owner for call in list(self.history.calls) if (seen := call.seen) is not None}
        with httpx.Client() as http:
            for job_id, owner in owner_of.items():
                self._call(http, "get", owner, "GET", job_id=job_id)

    def _keep(self, work: Callable[[httpx.Client, Random], float], rng: Random) -> None:
        try:
            with httpx.Client() as http:
                while not self._ended.is_set():
                    seconds = work(http, rng)
                    self._ended.wait(rng.uniform(0.2, 1.8) * seconds)
        except BaseException as error:  # noqa: BLE001 - `stop` raises it in the campaign's thread
            self._errors.append(error)

    def _watch(self, http: httpx.Client, _: Random) -> float:
        """Look whether the API answers, and how many explorations are open."""
        api = self._service.api
        with suppress(httpx.HTTPError):
            http.get(f"{self._service.url}/healthz", timeout=1)
            self._service.note_answer(api)
        with suppress(*DATABASE_TROUBLE), self._database.read() as connection:
            count = sa.select(sa.func.count()).where(jobs.c.state.in_(OPEN_STATES))
            self.num_open = connection.scalar(count) or 0
        return 0.1

    def _prune(self, _: httpx.Client, rng: Random) -> float:
        """Delete the oldest explorations, as `bexp prune` does, in the middle of everything."""
        if self._ended.wait(rng.uniform(0.5, 1.5) * PRUNE_PAUSE_SECONDS):
            return 0.0
        with suppress(*DATABASE_TROUBLE):
            calls = [Call("prune", "", job_id) for job_id in find_prunable(self._database, keep=KEPT_JOBS)[:NUM_PRUNED]]
            for call in calls:
                call.started = time.time()
                self.history.add(call)
            prune(self._database, [str(call.job_id) for call in calls])
            for call in calls:
                call.ended, call.status = time.time(), 204
        return 0.0

    def _act(self, http: httpx.Client, rng: Random) -> float:
        """Do one thing."""
        owner = rng.choice(OWNERS)
        choices: dict[Callable[[httpx.Client, Random, str], None], int] = {
            self._submit: 10 if self.num_open < self._open_jobs else 0,
            self._resend: 5,
            self._send_another: 2,
            self._peek: 1,
            self._list: 1,
            self._report: 2,
            **{partial(self._ask, name): weight for name, (_, _, weight) in ASKED.items()},
        }
        do = rng.choices(list(choices), weights=list(choices.values()))[0]
        if self._known[owner] or do == self._submit:
            do(http, rng, owner)
        return PAUSE_SECONDS

    def _submit(self, http: httpx.Client, rng: Random, owner: str) -> None:
        key, seed = f"key-{next(self._numbers) // 2}", self._draw_seed(rng)  # owners often have the same key
        self._keys[owner].append((key, seed))
        self.num_open += 1
        self._send(http, owner, key, seed)

    def _resend(self, http: httpx.Client, rng: Random, owner: str) -> None:
        self._send(http, owner, *rng.choice(self._keys[owner][-NUM_RECENT:]))

    def _send_another(self, http: httpx.Client, rng: Random, owner: str) -> None:
        key, seed = rng.choice(self._keys[owner][-NUM_RECENT:])
        other = seed
        while other == seed:
            other = self._draw_seed(rng)
        self._send(http, owner, key, other)

    def _draw_seed(self, rng: Random) -> int:
        return draw_seed(rng, self._service.tables, measures=self._service.measures)

    def _send(self, http: httpx.Client, owner: str, key: str, seed: int) -> None:
        document = {**search_of(seed, self._num_trials), "labels": {"key": key}}
        call = self._call(http, "submit", owner, "POST", "", key=key, number=seed, document=document)
        if call.seen is not None and call.seen.id not in self._known[owner]:
            self._known[owner].append(call.seen.id)

    def _recent(self, rng: Random, owner: str) -> str:
        return rng.choice(self._known[owner][-NUM_RECENT:])

    def _ask(self, operation: str, http: httpx.Client, rng: Random, owner: str) -> None:
        method, path, _ = ASKED[operation]
        self._call(http, operation, owner, method, path, job_id=self._recent(rng, owner))

    def _peek(self, http: httpx.Client, rng: Random, owner: str) -> None:
        other = next(each for each in OWNERS if each != owner)
        self._call(http, "peek", other, "GET", job_id=self._recent(rng, owner))

    def _list(self, http: httpx.Client, rng: Random, owner: str) -> None:
        key, _ = rng.choice(self._keys[owner][-NUM_RECENT:])
        self._call(http, "list", owner, "GET", f"?label=key={key}", key=key)

    def _report(self, http: httpx.Client, rng: Random, owner: str) -> None:
        number = next(self._numbers)
        document = {
            **{"tokens_per_second": 1000.0, "steps": number, "micro_batch_size": 1, "seconds": 1.0},
            "hardware": "another device, whose runs say nothing about the searches here",
            "finished_at": datetime.now(UTC).isoformat(),
        }
        job_id = self._recent(rng, owner)
        self._call(http, "report", owner, "POST", "/run-reports", job_id=job_id, number=number, document=document)

    def _call(
        self,
        http: httpx.Client,
        operation: str,
        owner: str,
        method: str,
        path: str = "",
        *,
        job_id: str | None = None,
        key: str | None = None,
        number: int = 0,
        document: Mapping[str, Any] | None = None,
    ) -> Call:
        url = f"{self._service.url}/v1/explorations{'' if job_id is None else f'/{job_id}'}{path}"
        headers = self.headers[owner] | ({"Idempotency-Key": key} if operation == "submit" and key else {})
        call = Call(operation, owner, job_id, key, number, started=time.time())
        self.history.add(call)
        try:
            reply = http.request(method, url, json=document, headers=headers, timeout=PATIENCE_SECONDS)
            call.status = reply.status_code
        except httpx.HTTPError as error:
            call.error = type(error).__name__
        call.ended = time.time()
        if call.is_done and method != "GET":
            self._written.set()
        if call.is_done and operation in {"submit", "get", "peek", "cancel", "resume"}:
            call.seen = Seen.of(reply.json())
        elif call.is_done and operation == "list":
            call.listed = frozenset(item["id"] for item in reply.json()["items"])
        return call
