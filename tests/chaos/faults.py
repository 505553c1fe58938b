"""The faults of a campaign, drawn at random. Those that last are over later, while others begin."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

import sqlalchemy as sa

from bexp.storage.database import DATABASE_TROUBLE, Database
from bexp.storage.jobs import JobState
from bexp.storage.tables import jobs
from tests.chaos.databases import ChaosDatabase
from tests.chaos.failpoints import Failpoints
from tests.chaos.fork_server import StartedProcess
from tests.chaos.processes import LEASE_SECONDS, Service

API_LIFE_SECONDS = 1.0
"""An API that is killed sooner after its first answer would hardly serve anybody."""

DATABASE_LIFE_SECONDS = 20.0
"""Between two outages the others find something to do."""

AIMED_SHARE = 0.8
"""Of the faults of a worker: they strike one that runs a job. The others strike whichever, such as one that starts."""


class Faults:
    """Kills, freezes and outages. `hurt` begins one, `tend` ends what is over and starts what has died."""

    def __init__(
        self,
        service: Service,
        database: ChaosDatabase,
        opened: Database,
        rng: Random,
        failpoints: Failpoints,
        await_write: Callable[[], None],
    ) -> None:
        self.failpoints = failpoints
        self._await_write = await_write
        self.counts: Counter[str] = Counter()
        self.num_during_jobs = 0
        """How many faults outside failpoints struck a worker that ran a job."""
        self._opened = opened
        self._service = service
        self._database = database
        self._rng = rng
        self._frozen: dict[int, tuple[float, StartedProcess]] = {}  # by pid: until when
        self._outage: threading.Thread | None = None
        self._database_answers_since = time.monotonic()

    def hurt(self) -> bool:
        """Begin one fault, if the one that is drawn can begin now."""
        choices: list[tuple[str, int, Callable[[], bool]]] = [
            ("worker_kill", 3, self._kill_worker),
            ("worker_freeze_past_lease", 2, self._freeze_worker),
            ("worker_end", 1, self._end_worker),
            ("api_kill", 1, self._kill_api),
            (self._database.fault, 1, self._hurt_database),
            ("failpoints", 12, self._arm),
        ]
        name, _, begin = self._rng.choices(choices, weights=[weight for _, weight, _ in choices])[0]
        begun = begin()
        self.counts[name] += begun
        return begun

    def tend(self) -> None:
        """Let go on what was frozen long enough, and start another process for each that has ended."""
        now = time.monotonic()
        for pid, (until, worker) in list(self._frozen.items()):
            if now >= until or worker.poll() is not None:
                del self._frozen[pid]
                with suppress(ProcessLookupError):
                    worker.send_signal(signal.SIGCONT)
        self.failpoints.tend()
        self._service.tend()

    def end(self) -> None:
        """Wake up all that sleeps, and wait until no fault lasts any more."""
        self._frozen = {pid: (0.0, worker) for pid, (_, worker) in self._frozen.items()}
        self.failpoints.end()
        self._database.calm.set()
        while self._frozen or self._is_away():
            self.tend()
            time.sleep(0.05)
        self.counts["failpoints"] = self.failpoints.struck.total()

    def _arm(self) -> bool:
        """Arm some edges. Whether a process passes them is seen later."""
        if self._is_away():
            return False
        self.failpoints.arm(self._rng.choice((1, 2, 3)))
        return True

    def _end_worker(self) -> bool:
        """Tell a worker to end, which puts its job back."""
        worker = self._choose_worker(self._awake())
        if worker is not None:
            worker.terminate()
        return worker is not None

    def _kill_worker(self) -> bool:
        worker = self._choose_worker(self._service.workers)
        if worker is None:
            return False
        worker.kill()
        worker.wait()
        return True

    def _freeze_worker(self) -> bool:
        """Freeze a worker until its lease is over; meanwhile another one may take its job."""
        worker = self._choose_worker(self._awake())
        if worker is None:
            return False
        worker.send_signal(signal.SIGSTOP)
        self._frozen[worker.pid] = (time.monotonic() + LEASE_SECONDS + self._rng.uniform(0.2, 2.0), worker)
        return True

    def _awake(self) -> list[StartedProcess]:
        frozen = self._frozen.keys() | self.failpoints.asleep.keys()
        return [worker for worker in self._service.workers if worker.pid not in frozen]

    def _choose_worker(self, among: Sequence[StartedProcess]) -> StartedProcess | None:
        """Return the worker to strike: mostly one that runs a job. Null if there is none."""
        owners = self._owners()
        alive = [worker for worker in among if worker.poll() is None]
        busy = [worker for worker in alive if any(f"-{worker.pid}-" in owner for owner in owners)]
        choices = busy if self._rng.random() < AIMED_SHARE else alive
        if not choices:
            return None
        worker = self._rng.choice(choices)
        self.num_during_jobs += worker in busy
        return worker

    def _owners(self) -> list[str]:
        """The workers that hold a job, as far as the database tells it now."""
        query = sa.select(jobs.c.worker).where(jobs.c.state == JobState.RUNNING.value)
        with suppress(*DATABASE_TROUBLE), self._opened.read() as connection:
            return [str(owner) for owner in connection.scalars(query)]
        return []

    def _kill_api(self) -> bool:
        answers_since = self._service.api_answers_since
        if self._is_away() or answers_since is None or time.monotonic() - answers_since < API_LIFE_SECONDS:
            return False
        self._service.api.kill()
        self._service.api.wait()
        return True

    def _is_away(self) -> bool:
        """Whether the database is away. The API is left alone then, because it must still answer in time."""
        return self._outage is not None and self._outage.is_alive()

    def _hurt_database(self) -> bool:
        if self._is_away():
            return False
        if time.monotonic() - self._database_answers_since < DATABASE_LIFE_SECONDS:
            return False

        self.failpoints.disarm()

        def hurt(rng: Random) -> None:
            self._database.hurt(rng, self._await_write)
            self._database_answers_since = time.monotonic()

        self._outage = threading.Thread(target=hurt, args=(Random(self._rng.random()),))
        self._outage.start()
        return True
