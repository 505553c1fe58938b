"""What is said while the embedded worker does not start the exploration."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bexp.api.cli import explore
from bexp.api.cli.errors import CommandError
from bexp.api.cli.watchdog import Watchdog
from bexp.api.client import Client, Job, ServiceError, Worker
from bexp.api.embedded import NOTHING, EmbeddedService
from tests.cli.samples import job_document


class Stub:
    """Stands for the service and its client: the worker's log, the job and the time are what a test says."""

    def __init__(self, words: str, **job: Any) -> None:
        self.words = words
        self.job = Job.model_validate(job_document("queued", **job))
        self.now = 100.0
        self.running_worker: str | None = None
        self.cancelled: list[str] = []

    def check(self) -> None:
        if self.words == "dead":
            raise ServiceError("dead")

    def last_words(self) -> str:
        return self.words

    def get(self, _job_id: str) -> Job:
        return self.job

    def workers(self) -> tuple[Worker, ...]:
        if self.running_worker is None:
            return ()
        known: dict[str, Any] = {"state": "measuring", "exploration": self.job.id, "host": "h", "devices": "cpu"}
        known |= {"id": self.running_worker, "num_devices": 1, "device_name": "cpu", "versions": {}, "targets": {}}
        return (Worker.model_validate(known | {"last_heartbeat_at": "2026-11-22T10:00:00Z"}),)

    def owns(self, worker_id: str) -> bool:
        return worker_id.startswith("own-")

    def cancel(self, job_id: str) -> Job:
        self.cancelled.append(job_id)
        return self.job.model_copy(update={"state": "cancelled"})

    def watchdog(self, num_devices: int = 1) -> Watchdog:
        client, service = cast("Client", self), cast("EmbeddedService", self)
        return Watchdog(client, self.job, service, num_devices, clock=lambda: self.now)

    def later(self, seconds: float, watchdog: Watchdog) -> None:
        self.now += seconds
        watchdog()


@pytest.mark.parametrize(
    ("words", "said"), [("importing", "its worker says: importing"), (NOTHING, "its worker is still starting")]
)
def test_a_worker_that_starts_slowly_is_mentioned_once(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    stub = Stub(words)
    watchdog = stub.watchdog()
    stub.later(9, watchdog)
    assert capsys.readouterr().err == ""
    for _ in range(3):
        stub.later(5, watchdog)
    assert capsys.readouterr().err == f"not started after 10 s; {said}\n"


def test_a_device_that_is_taken_is_named_at_once_with_its_holder(capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub("12:00 INFO Waiting for the device: cpu is in use by another profiler (process 17)")
    watchdog = stub.watchdog()
    for seconds in (0, 2, 100):
        stub.later(seconds, watchdog)
    assert capsys.readouterr().err == "Waiting for the device: cpu is in use by another profiler (process 17)\n"


def test_a_worker_that_is_ready_and_leaves_the_job_ends_the_wait_with_what_the_job_needs() -> None:
    stub = Stub("worker a is ready: NVIDIA H100, 79.2 GiB")
    watchdog = stub.watchdog(num_devices=4)
    for _ in range(2):
        stub.later(5, watchdog)
    with pytest.raises(CommandError, match="it needs 4 devices; the worker has NVIDIA H100"):
        stub.later(6, watchdog)


def test_a_job_that_has_been_claimed_is_not_watched_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub("worker a is ready: NVIDIA H100, 79.2 GiB", attempt=2)
    watchdog = stub.watchdog()
    stub.job = stub.job.model_copy(update={"attempt": 3})
    for _ in range(3):
        stub.later(20, watchdog)
    assert capsys.readouterr().err == ""


def test_a_dead_child_ends_the_watch() -> None:
    with pytest.raises(ServiceError, match="dead"):
        Stub("dead").watchdog()()


@pytest.mark.parametrize(
    ("worker", "spares_others", "ends"),
    [("own-7-cpu", True, True), (None, True, True), ("other-7-cpu", True, False), ("other-7-cpu", False, True)],
)
def test_an_interrupted_resume_leaves_alone_what_another_worker_runs(
    monkeypatch: pytest.MonkeyPatch, worker: str | None, spares_others: bool, ends: bool
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explore, "follow", interrupt)
    monkeypatch.setattr(explore, "say_best", lambda *_: None)
    stub = Stub("the worker w is ready: a CPU")
    stub.running_worker = worker
    with pytest.raises(KeyboardInterrupt):
        explore.follow_or_cancel(
            cast("Client", stub), stub.job, stub.watchdog(), "again", as_json=False, spares_others=spares_others
        )
    assert stub.cancelled == ([stub.job.id] if ends else [])


def test_a_job_that_another_worker_runs_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub("the worker w is ready: a CPU")
    stub.running_worker = "other-7-cpu"
    watchdog = stub.watchdog()
    for _ in range(4):
        stub.later(9, watchdog)
    assert capsys.readouterr().err == ""
