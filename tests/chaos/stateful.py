"""Compares explorations with a model, over sequences of calls: `python -m tests.chaos.stateful --examples 2000`.

Hypothesis draws what clients of two owners and workers do, one call after the other, and makes a sequence that fails
short. The model says what each call must do: a key stands for one exploration, what is cancelled stays cancelled, what
is deleted is gone, a lost lease writes nothing, an end comes once, and a quota holds.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from bexp.api.settings import ServiceSettings
from bexp.explorer.records.event import EventCode
from bexp.storage.database import Database, open_database
from bexp.storage.jobs import JobState
from bexp.storage.leases import Lease, LeaseLostError
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.quotas import Quota, set_quota
from bexp.storage.schema import upgrade
from bexp.storage.tokens import create_token
from tests.api.serving import in_process
from tests.contracts.jobs import ANSWER, codes, expire
from tests.contracts.samples import MODEL, make_progress, make_report, make_worker

JOBS = "/v1/explorations"
MAX_QUEUED = MAX_ATTEMPTS = 2
FREE, TIGHT = "free", "tight"
ENDS = [int(code) for code in EventCode if code.ends_job]

WORKER = make_worker(fingerprint=make_report().hardware.fingerprint)

owners = st.sampled_from((FREE, TIGHT))
is_own = st.sampled_from((True, True, True, False))


@dataclass
class Expected:
    """What an exploration must be. `tries` are the attempts since something was stored."""

    id: str
    owner: str
    key: str
    seed: int
    state: str = "queued"
    is_cancelled: bool = False
    is_held: bool = False
    is_answered: bool = False
    is_deleted: bool = False
    tries: int = 0
    num_ends: int = 0
    num_reports: int = 0
    trials: int = 0
    lease: Lease | None = None
    lost: list[Lease] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return JobState(self.state).is_final

    @property
    def is_void(self) -> bool:
        """Whether its key is free again."""
        return self.state in {"failed", "cancelled"} or self.is_cancelled

    def end(self, state: JobState) -> None:
        """It ends."""
        self.state, self.num_ends, self.is_held = state.value, self.num_ends + 1, False
        self._lose()

    def queue(self) -> None:
        """It waits again."""
        self.state, self.is_held = "queued", False
        self._lose()

    def take(self, lease: Lease) -> None:
        """A worker takes it."""
        self._lose()
        self.state, self.is_held, self.lease, self.tries = "running", True, lease, self.tries + 1

    def _lose(self) -> None:
        self.lost += [self.lease] if self.lease is not None else []
        self.lease = None


class Explorations(RuleBasedStateMachine):
    """Each sequence has owners of its own in one service."""

    client: ClassVar[TestClient]
    database: ClassVar[Database]
    numbers: ClassVar[Iterator[int]] = itertools.count()
    jobs = Bundle("jobs")

    @initialize()
    def begin(self) -> None:
        number = next(self.numbers)
        self.expected: dict[str, Expected] = {}
        self.work = Queue(self.database, QueueSettings(max_attempts=MAX_ATTEMPTS))
        self.names = names = {owner: f"{owner}-{number}" for owner in (FREE, TIGHT)}
        self.headers = {
            owner: {"Authorization": f"Bearer {create_token(self.database, name, owner=name)}"}
            for owner, name in names.items()
        }
        set_quota(self.database, names[TIGHT], Quota(max_queued=MAX_QUEUED))

    @rule(target=jobs, owner=owners, key=st.sampled_from("abc"), seed=st.sampled_from((1, 1, 1, 2)))
    def submit(self, owner: str, key: str, seed: int) -> Any:
        first = next((job for job in self._of(owner) if job.key == key and not job.is_void), None)
        document = {"model": MODEL.model_dump(mode="json"), "seed": seed, "labels": {"key": key}}
        headers = self.headers[owner] | {"Idempotency-Key": key}
        answer = self.client.post(JOBS, json=document, headers=headers)
        if first is not None:
            assert answer.status_code == (202 if first.seed == seed else 422), answer.text
            assert first.seed != seed or answer.json()["id"] == first.id
            return multiple()
        if self._is_full(owner):
            assert answer.status_code == 429, answer.text
            return multiple()
        assert answer.status_code == 202, answer.text
        job_id = answer.json()["id"]
        assert job_id not in self.expected
        self.expected[job_id] = Expected(job_id, owner, key, seed)
        return job_id

    @rule(job_id=jobs, own=is_own)
    def cancel(self, job_id: str, own: bool) -> None:
        job = self.expected[job_id]
        answer = self._call("POST", job, own, "/cancel")
        if self._is_hidden(job, own):
            assert answer.status_code == 404
            return
        if not job.is_final and not job.is_held:
            job.end(JobState.CANCELLED)
        elif not job.is_final:
            job.is_cancelled = True
        assert answer.status_code == (200 if job.is_final else 202)
        self._check(job, answer.json())

    @rule(job_id=jobs, own=is_own)
    def resume(self, job_id: str, own: bool) -> None:
        job = self.expected[job_id]
        answer = self._call("POST", job, own, "/resume")
        if self._is_hidden(job, own):
            assert answer.status_code == 404
        elif job.state == "succeeded":
            assert answer.status_code == 409
        elif job.is_final and self._is_full(job.owner):
            assert answer.status_code == 429
        else:
            assert answer.status_code == 202
            if job.is_final:
                job.queue()
                job.is_cancelled, job.tries = False, 0
            self._check(job, answer.json())

    @rule(job_id=jobs, own=is_own)
    def delete(self, job_id: str, own: bool) -> None:
        job = self.expected[job_id]
        answer = self._call("DELETE", job, own)
        if self._is_hidden(job, own):
            assert answer.status_code == 404
        else:
            assert answer.status_code == (204 if job.is_final else 409)
            job.is_deleted = job.is_final

    @rule(job_id=jobs, own=is_own)
    def report(self, job_id: str, own: bool) -> None:
        job = self.expected[job_id]
        document = {
            **{"tokens_per_second": 1.0, "steps": 1, "micro_batch_size": 1, "seconds": 1.0, "hardware": "x"},
            "finished_at": "2026-01-15T19:39:12Z",
        }
        answer = self._call("POST", job, own, "/run-reports", document)
        if self._is_hidden(job, own):
            assert answer.status_code == 404
        elif not job.is_answered:
            assert answer.status_code == 409
        else:
            job.num_reports += 1
            assert (answer.status_code, answer.json()["number"]) == (201, job.num_reports)

    @rule(job_id=jobs, own=is_own)
    def show(self, job_id: str, own: bool) -> None:
        job = self.expected[job_id]
        answer = self._call("GET", job, own)
        assert answer.status_code == (404 if self._is_hidden(job, own) else 200)
        if answer.is_success:
            self._check(job, answer.json())
            self._check_log(job)

    @rule(owner=owners, key=st.sampled_from("abc"))
    def list_key(self, owner: str, key: str) -> None:
        answer = self.client.get(JOBS, params={"label": f"key={key}"}, headers=self.headers[owner])
        there = {job.id: job.state for job in self._of(owner) if job.key == key}
        assert {item["id"]: item["state"] for item in answer.json()["items"]} == there

    @rule()
    def claim(self) -> None:
        there = [job for job in self.expected.values() if not job.is_deleted]
        for job in there:
            if job.is_final or job.is_held:
                continue
            if job.is_cancelled:
                job.end(JobState.CANCELLED)
            elif job.tries >= MAX_ATTEMPTS:
                job.end(JobState.FAILED)
        waiting = {job.id for job in there if not job.is_final and not job.is_held}
        claim = self.work.claim(WORKER, among=list(self.expected))
        assert (claim is None) == (not waiting)
        if claim is not None:
            assert claim.job.id in waiting
            job = self.expected[claim.job.id]
            assert len(claim.history) == job.trials
            job.take(claim.lease)
            self.work.pin(claim.lease, make_report())

    @rule(job_id=jobs)
    def record(self, job_id: str) -> None:
        job = self.expected[job_id]
        if job.lease is not None:
            self.work.record(job.lease, make_progress(job.trials))
            job.trials += 1
            job.tries, job.is_held, job.is_answered = 1, True, True

    @rule(job_id=jobs, state=st.sampled_from((JobState.SUCCEEDED, JobState.FAILED)))
    def finish(self, job_id: str, state: JobState) -> None:
        job = self.expected[job_id]
        if job.lease is None:
            return
        if job.is_cancelled:
            self.work.finish(job.lease, JobState.CANCELLED)
            job.end(JobState.CANCELLED)
        else:
            self.work.finish(job.lease, state, answer=ANSWER if state is JobState.SUCCEEDED else None, error="a fault")
            job.is_answered |= state is JobState.SUCCEEDED
            job.end(state)

    @rule(job_id=jobs)
    def release(self, job_id: str) -> None:
        job = self.expected[job_id]
        if job.lease is not None:
            self.work.release(job.lease)
            job.tries -= 1
            job.queue()

    @rule(job_id=jobs)
    def lose_worker(self, job_id: str) -> None:
        job = self.expected[job_id]
        if job.is_held:
            expire(self.database, job_id)
            job.is_held = False

    @rule(job_id=jobs)
    def write_late(self, job_id: str) -> None:
        for lease in self.expected[job_id].lost:
            with pytest.raises(LeaseLostError):
                self.work.record(lease, make_progress(9))
            with pytest.raises(LeaseLostError):
                self.work.finish(lease, JobState.SUCCEEDED, answer=ANSWER)
            with pytest.raises(LeaseLostError):
                self.work.heartbeat(lease)

    def teardown(self) -> None:
        """Look at every log: it has no gap, and an end for each time that the exploration ended."""
        for job in getattr(self, "expected", {}).values():
            if not job.is_deleted:
                self._check_log(job)

    def _call(self, method: str, job: Expected, own: bool, path: str = "", document: object = None) -> Any:
        caller = job.owner if own else {FREE: TIGHT, TIGHT: FREE}[job.owner]
        return self.client.request(method, f"{JOBS}/{job.id}{path}", json=document, headers=self.headers[caller])

    def _check(self, job: Expected, shown: dict[str, Any]) -> None:
        told = (shown["state"], shown["cancel_requested"], shown["owner"], shown["request"]["seed"])
        assert told == (job.state, job.is_cancelled, self.names[job.owner], job.seed)
        assert (shown["recommendation"] is not None) == job.is_answered
        assert (shown["finished_at"] is not None) == job.is_final

    def _check_log(self, job: Expected) -> None:
        assert sum(code in ENDS for code in codes(self.database, job.id)) == job.num_ends

    def _of(self, owner: str) -> list[Expected]:
        return [job for job in self.expected.values() if job.owner == owner and not job.is_deleted]

    def _is_full(self, owner: str) -> bool:
        return owner == TIGHT and sum(job.state == "queued" for job in self._of(owner)) >= MAX_QUEUED

    @staticmethod
    def _is_hidden(job: Expected, own: bool) -> bool:
        return job.is_deleted or not own


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """Serve the sequences of `search`."""
    url = f"sqlite:///{folder / 'stateful.db'}"
    database = open_database(url)
    upgrade(database)
    settings_of_service = ServiceSettings(
        url, require_token=True, token_rate=0, address_rate=0, waiting_check_seconds=3600
    )
    with in_process(settings_of_service) as client:
        Explorations.client, Explorations.database = client, database
        yield
    database.dispose()


def search(examples: int, steps: int, *, derandomize: bool = False, shrinks: bool = True) -> None:
    """Run so many sequences; raise the shortest one that the model does not explain."""
    with tempfile.TemporaryDirectory(prefix="bexp-stateful-") as folder, served(Path(folder)):
        run_machine(
            Explorations,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                derandomize=derandomize,
                phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
                suppress_health_check=list(HealthCheck),
            ),
        )


def main() -> None:
    """Search; a sequence that fails is printed, and the status is 1 then."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.stateful", description=__doc__)
    parser.add_argument("--examples", type=int, default=2000, help="sequences of calls")
    parser.add_argument("--steps", type=int, default=50, help="calls of a sequence, at most")
    options = parser.parse_args()
    search(options.examples, options.steps)


if __name__ == "__main__":
    main()
