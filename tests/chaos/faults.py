"""The faults of a campaign, drawn at random. Those that last are over later, while others begin."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random

from tests.chaos.databases import ChaosDatabase
from tests.chaos.processes import LEASE_SECONDS, Service

API_LIFE_SECONDS = 3.0
"""An API that is killed sooner after its first answer would hardly serve anybody."""


class Faults:
    """Kills, freezes and outages. `hurt` begins one, `tend` ends what is over and starts what has died."""

    def __init__(self, service: Service, database: ChaosDatabase, rng: Random) -> None:
        self.counts: Counter[str] = Counter()
        self._service = service
        self._database = database
        self._rng = rng
        self._frozen: dict[int, tuple[float, subprocess.Popen[bytes]]] = {}  # by pid: until when
        self._outage: threading.Thread | None = None

    def hurt(self) -> None:
        """Begin one fault."""
        choices: list[tuple[str, int, Callable[[], bool]]] = [
            ("worker_kill", 4, self._kill_worker),
            ("worker_freeze_past_lease", 4, self._freeze_worker),
            ("api_kill", 2, self._kill_api),
            (self._database.fault, 1, self._hurt_database),
        ]
        name, _, begin = self._rng.choices(choices, weights=[weight for _, weight, _ in choices])[0]
        self.counts[name] += begin()

    def tend(self) -> None:
        """Let go on what was frozen long enough, and start another process for each that has ended."""
        now = time.monotonic()
        for pid, (until, worker) in list(self._frozen.items()):
            if now >= until or worker.poll() is not None:
                del self._frozen[pid]
                with suppress(ProcessLookupError):
                    worker.send_signal(signal.SIGCONT)
        self._service.tend()

    def end(self) -> None:
        """Wait until no fault lasts any more."""
        if self._outage is not None:
            self._outage.join()
        while self._frozen:
            self.tend()
            time.sleep(0.05)

    def _kill_worker(self) -> bool:
        worker = self._rng.choice(self._service.workers)
        worker.kill()
        worker.wait()
        return True

    def _freeze_worker(self) -> bool:
        """Freeze a worker until its lease is over; meanwhile another one may take its job."""
        running = [worker for worker in self._service.workers if worker.pid not in self._frozen]
        if not running:
            return False
        worker = self._rng.choice(running)
        worker.send_signal(signal.SIGSTOP)
        self._frozen[worker.pid] = (time.monotonic() + LEASE_SECONDS + self._rng.uniform(0.2, 2.0), worker)
        return True

    def _kill_api(self) -> bool:
        answers_since = self._service.api_answers_since
        if answers_since is None or time.monotonic() - answers_since < API_LIFE_SECONDS:
            return False
        self._service.api.kill()
        self._service.api.wait()
        return True

    def _hurt_database(self) -> bool:
        if self._outage is not None and self._outage.is_alive():
            return False
        rng = Random(self._rng.random())
        self._outage = threading.Thread(target=self._database.hurt, args=(rng,))
        self._outage.start()
        return True
