"""The clients of a campaign: they keep jobs open, cancel some of them, and note what has finished."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from http import HTTPStatus
from random import Random
from typing import Any

import httpx
import sqlalchemy as sa

from bexp.storage.database import DATABASE_TROUBLE, Database
from bexp.storage.jobs import JobState, get_summary
from bexp.storage.tables import jobs
from bexp.workers.replay.recording import Recording
from tests.chaos.processes import TABLE, Service

PAUSE_SECONDS = 0.3
CANCEL_SHARE = 0.1
ENDLESS = 2000
"""Trials of a job that takes long enough to be cancelled while it runs."""

START_SECONDS = 180.0
MOST_JOBS = 10
"""Jobs that are tried for one cancel."""
FINAL = frozenset(state for state in JobState if state.is_final)


class Clients:
    """Submits jobs in a thread, from `start` to `stop`."""

    def __init__(self, service: Service, database: Database, rng: Random, *, num_trials: int, open_jobs: int) -> None:
        self.job_ids: dict[str, str] = {}
        """By idempotency key."""
        self.finished: set[str] = set()
        self.last_seqs: dict[str, int] = {}
        """How long the log of each job was when it was last looked at."""
        self.cancelled: set[str] = set()
        """Jobs that somebody has asked to cancel."""
        self._service = service
        self._database = database
        self._rng = rng
        self._open_jobs = open_jobs
        self._num_trials = num_trials
        self._http = httpx.Client()
        self._request = Recording.read(TABLE).header.request
        self._ended = threading.Event()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._keep_submitting)

    @property
    def open(self) -> set[str]:
        """The jobs that are not known to have finished."""
        return set(self.job_ids.values()) - self.finished

    def start(self) -> None:
        """Submit jobs from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Submit no more; raise what went wrong."""
        self._ended.set()
        self._thread.join()
        for error in self._errors:
            raise error

    def close(self) -> None:
        """Close the connections to the API."""
        self._http.close()

    def note_finished(self) -> None:
        """Look which jobs have finished."""
        with suppress(*DATABASE_TROUBLE):
            for job_id in self.open:
                summary = get_summary(self._database, job_id)
                self.last_seqs[job_id] = summary.last_seq
                if summary.state.is_final:
                    self.finished.add(job_id)

    def await_start(self) -> None:
        """Wait until the API answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if self._http.get(f"{self._service.url}/readyz", timeout=5).is_success:
                    return
            time.sleep(0.1)
        raise RuntimeError("the API does not start")

    def start_long(self) -> str:
        """Submit a job that would run for long; return its id."""
        # Our own search knows enough after a fifth of a second; Optuna's goes on for some seconds.
        document = {**self._document(1, ENDLESS), "sampler": "tpe"}
        reply = self._http.post(f"{self._service.url}/v1/explorations", json=document, timeout=60)
        return str(reply.json()["id"])

    def cancel(self, job_id: str) -> JobState | None:
        """Cancel a job, again where the API says to come back, and return how it ended; null if it did not in time."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            reply = self._http.post(f"{self._service.url}/v1/explorations/{job_id}/cancel", timeout=60)
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
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if get_summary(self._database, job_id).state in states:
                return True
            time.sleep(0.02)
        return False

    def _keep_submitting(self) -> None:
        try:
            while not self._ended.is_set():
                self.note_finished()
                with suppress(httpx.HTTPError):
                    self._http.get(f"{self._service.url}/healthz", timeout=1)
                    self._service.note_answer()
                    self._submit()
                self._ended.wait(PAUSE_SECONDS)
        except BaseException as error:  # noqa: BLE001 - `stop` raises it in the campaign's thread
            self._errors.append(error)

    def _submit(self) -> None:
        """Keep some jobs open. An answer that was lost is asked for again with the same key."""
        for number in range(len(self.finished) + self._open_jobs):
            key = f"key-{number}"
            if key in self.job_ids or self._ended.is_set():
                continue
            with suppress(httpx.HTTPError, KeyError, ValueError):
                reply = self._http.post(
                    f"{self._service.url}/v1/explorations",
                    json=self._document(number % 3, self._num_trials),
                    headers={"Idempotency-Key": key},
                    timeout=5,
                )
                assert reply.status_code not in {400, 409, 422}, reply.text
                if reply.status_code == httpx.codes.ACCEPTED:
                    self.job_ids[key] = reply.json()["id"]
                    self._cancel_some(self.job_ids[key])

    def _cancel_some(self, job_id: str) -> None:
        if self._rng.random() < CANCEL_SHARE:
            self.cancelled.add(job_id)
            self._http.post(f"{self._service.url}/v1/explorations/{job_id}/cancel", timeout=5)

    def _document(self, seed: int, num_trials: int) -> dict[str, Any]:
        budget = self._request.budget.model_copy(
            update={"max_trials": num_trials, "confidence_target": 99, "max_seconds": 40_000.0}
        )
        return {
            **self._request.model_copy(update={"budget": budget}).model_dump(mode="json"),
            "seed": seed,
            "fresh": True,
        }
