"""A client that times what becomes of one exploration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Any

import httpx
import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_summary
from bexp.storage.tables import jobs
from bexp.workers.replay.recording import Recording
from tests.chaos.processes import TABLE, Service
from tests.waits import PATIENCE_SECONDS

ENDLESS = 2000
"""Trials of a job that takes long enough to be cancelled while it runs."""

MOST_JOBS = 10
"""Jobs that are tried for one cancel."""
FINAL = frozenset(state for state in JobState if state.is_final)


class Clients:
    """Submits single explorations, and waits for what becomes of them."""

    def __init__(
        self, service: Service, database: Database, rng: Random, headers: Mapping[str, str] | None = None
    ) -> None:
        self._service = service
        self._database = database
        self._rng = rng
        self._http = httpx.Client(headers=headers)

    def close(self) -> None:
        """Close the connections to the API."""
        self._http.close()

    def await_start(self) -> None:
        """Wait until the API answers."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if self._http.get(f"{self._service.url}/readyz", timeout=5).is_success:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the API does not start: {self._service.explain_silence()}")

    def start_long(self) -> str:
        """Submit a job that would run for long; return its id."""
        # Our own search knows enough after a fifth of a second; Optuna's goes on for some seconds.
        document = {**document_of(1, ENDLESS), "sampler": "tpe"}
        reply = self._http.post(f"{self._service.url}/v1/explorations", json=document, timeout=PATIENCE_SECONDS)
        return str(reply.json()["id"])

    def cancel(self, job_id: str) -> JobState | None:
        """Cancel a job, again where the API says to come back, and return how it ended; null if it did not in time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            reply = self._http.post(f"{self._service.url}/v1/explorations/{job_id}/cancel", timeout=PATIENCE_SECONDS)
            if reply.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                reply.raise_for_status()
                break
            time.sleep(float(reply.headers["Retry-After"]))
        return get_summary(self._database, job_id).state if self._await(job_id, FINAL) else None

    def owner_of(self, job_id: str) -> str:
        """Return the worker that holds a job."""
        with self._database.read() as connection:
            return str(connection.scalar(sa.select(jobs.c.worker).where(jobs.c.id == job_id)))

    def time_cancel(self) -> float | None:
        """Return the seconds from the cancel of a running job to its end; null if it did not start or end in time.

        A job that ended by itself before its cancel says nothing, and another one takes its place, but not for ever.
        """
        for _ in range(MOST_JOBS):
            job_id = self.start_long()
            if not self._await(job_id, FINAL | {JobState.RUNNING}):
                return None
            time.sleep(self._rng.uniform(0.0, 0.5))
            begin = time.monotonic()
            state = self.cancel(job_id)
            if state is None or state is JobState.CANCELLED:
                return None if state is None else time.monotonic() - begin
        return None

    def _await(self, job_id: str, states: frozenset[JobState]) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if get_summary(self._database, job_id).state in states:
                return True
            time.sleep(0.02)
        return False


@cache
def document_of(seed: int, num_trials: int, table: Path = TABLE) -> dict[str, Any]:
    """Return a request that a recorded table answers, and that is always measured."""
    request = Recording.read(table).header.request
    changes = {"max_trials": num_trials, "confidence_target": 99, "max_seconds": 40_000.0}
    request = request.model_copy(update={"budget": request.budget.model_copy(update=changes)})
    return {**request.model_dump(mode="json"), "seed": seed, "fresh": True}
