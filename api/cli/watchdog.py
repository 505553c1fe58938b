"""Watches the embedded worker while a command follows its exploration."""

from __future__ import annotations

import time
from collections.abc import Callable

from pydantic import ValidationError

from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.client import Client, Job
from bexp.api.embedded import NOTHING, EmbeddedService
from bexp.explorer.spec.hardware import DeviceReport

START_SECONDS = 10.0
CLAIM_SECONDS = 10.0
"""How long a worker that is ready may leave the only job that it is there for."""
ASK_SECONDS = 1.0
BUSY, READY = "Waiting for the device: ", " is ready: "
"""What the worker's log says before it is ready, and then."""


class Watchdog:
    """Checks that the children are alive, and says why a job that needs `num_devices` does not start.

    Raises CommandError if the worker is ready and does not take the job: nobody else will.
    """

    def __init__(
        self,
        client: Client,
        job: Job,
        service: EmbeddedService,
        num_devices: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._job = job
        self._service = service
        self._num_devices = num_devices
        self._clock = clock
        self._speak_at = clock() + START_SECONDS
        self._ask_at = 0.0
        self._ready_at: float | None = None
        self._is_claimed = False

    def __call__(self) -> None:
        """Check once."""
        self._service.check()
        if self._is_claimed or self._clock() < self._ask_at:
            return
        self._ask_at = self._clock() + ASK_SECONDS
        now = self._client.get(self._job.id)
        self._is_claimed = now.attempt > self._job.attempt or now.is_final or self.other_worker() is not None
        if not self._is_claimed:
            self._look(self._service.last_words())

    def other_worker(self) -> str | None:
        """Return the live worker that runs the job and is not the embedded one; null if there is none."""
        for worker in self._client.workers():
            here = worker.exploration == self._job.id and worker.state == "measuring"
            if here and not self._service.owns(worker.id):
                return worker.id
        return None

    def _look(self, words: str) -> None:
        if READY in words:
            self._ready_at = self._clock() if self._ready_at is None else self._ready_at
            if self._clock() - self._ready_at >= CLAIM_SECONDS:
                has = words.partition(READY)[2]
                raise CommandError(
                    ExitCode.SERVICE, "the worker cannot run this exploration", f"{self._needs()}; the worker has {has}"
                )
        elif self._speak_at != float("inf"):
            if BUSY in words:
                say(BUSY + words.partition(BUSY)[2])
            elif self._clock() >= self._speak_at:
                state = "its worker is still starting" if words == NOTHING else f"its worker says: {words}"
                say(f"not started after {START_SECONDS:.0f} s; {state}")
            else:
                return
            self._speak_at = float("inf")

    def _needs(self) -> str:
        request = self._job.request
        kind = "" if request is None or request.device_kind is None else f" {request.device_kind}"
        needs = f"it needs {self._num_devices}{kind} device{'' if self._num_devices == 1 else 's'}"
        try:
            started_on = DeviceReport.model_validate(self._job.report).hardware.describe()
        except ValidationError:  # it has not started yet
            return needs
        return f"{needs} of the hardware that it started on: {started_on}"
