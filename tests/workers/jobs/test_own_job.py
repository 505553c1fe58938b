"""A worker that is there for one job: when it ends, and what becomes of the job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bexp.explorer.records.event import EventCode
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.waiting import find_reason
from bexp.storage.workers import register_worker
from bexp.workers import serving
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.serving import OwnJob
from tests.contracts.jobs import expire, store
from tests.contracts.samples import make_report, make_request, make_worker
from tests.waits import PATIENCE_SECONDS
from tests.workers.fakes import FakeProfiler


@pytest.fixture
def queue(sqlite_database: Database) -> Queue:
    return Queue(sqlite_database)


@pytest.fixture
def worker(queue: Queue) -> JobWorker:
    return JobWorker(queue, FakeProfiler(), "cpu", name="me")


@pytest.fixture
def own(worker: JobWorker, monkeypatch: pytest.MonkeyPatch) -> OwnJob:
    for name in ("CHECK_SECONDS", "PATIENCE_SECONDS", "CLAIM_SECONDS", "KEEP_SECONDS"):
        monkeypatch.setattr(serving, name, 0.01)
    return OwnJob(worker, "own")


def submit(queue: Queue, job_id: str = "own", name: str = "me", **changes: Any) -> None:
    queue.enqueue(make_request(**changes), job_id=job_id, own_worker=name)


@contextmanager
def closed_stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield


def run_by(queue: Queue, name: str) -> None:
    other = make_worker("other-1-cpu", host="other", name=name)
    register_worker(queue.database, other)
    assert queue.claim(other) is not None


def ends(watch: Callable[[threading.Event], Any], seconds: float = PATIENCE_SECONDS) -> bool:
    ending = threading.Event()
    thread = threading.Thread(target=watch, args=(ending,), daemon=True)
    thread.start()
    has_ended = ending.wait(seconds)
    ending.set()
    thread.join(PATIENCE_SECONDS)
    return has_ended


def test_a_worker_that_ends_by_itself_cancels_nothing(
    queue: Queue, own: OwnJob, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_stdin(monkeypatch):
        own.end_with_stdin(ending)
        assert (ending.is_set(), ending.waits) == (True, []), "a job that is not there is not waited for"
        submit(queue)
        own.end_with_stdin(ending)
    assert get_job(queue.database, "own").state is JobState.QUEUED


@pytest.mark.parametrize("name", ["", "another"])
def test_a_job_that_another_runs_goes_on(queue: Queue, own: OwnJob, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    submit(queue, name=name)
    run_by(queue, name)
    queue.resume("own", own_worker="me")
    with closed_stdin(monkeypatch):
        assert ends(own.end_with_stdin)
    assert not get_job(queue.database, "own").cancel_requested


@pytest.mark.parametrize("name", ["", "another"])
def test_a_job_that_another_worker_left_is_this_ones(queue: Queue, own: OwnJob, name: str) -> None:
    submit(queue, name=name)
    run_by(queue, name)
    assert not ends(own.watch, 0.2)
    assert get_job(queue.database, "own").own_worker == name
    expire(queue.database, "own")
    store(queue.database, "own", own_worker_until=None)
    assert not ends(own.watch, 0.2)
    assert get_job(queue.database, "own").own_worker == "me"


def test_an_own_worker_lives_as_long_as_its_process_says_so(queue: Queue, worker: JobWorker, ending: Ending) -> None:
    submit(queue)
    told: list[str | None] = []

    def age() -> None:
        store(queue.database, "own", own_worker_until=None)
        told.append(find_reason(queue.database, "own"))

    ending.actions = {20.0: age, 26.0: lambda: told.append(find_reason(queue.database, "own")), 30.0: ending.set}
    OwnJob(worker, "own").watch(ending)
    assert told == ["its own worker has ended", "its own worker is starting"]


def test_a_job_that_the_worker_cannot_run_is_refused(
    queue: Queue, own: OwnJob, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(queue)
    register_worker(queue.database, make_worker("own-1-cpu", name="me", fingerprint="f"))
    own._worker.hardware = make_report().hardware
    with monkeypatch.context() as patience:
        patience.setattr(serving, "CLAIM_SECONDS", 60.0)
        assert not ends(own.watch, 0.2)
    assert ends(own.watch)
    assert own.is_refused
    has = f"; the worker has {make_report().hardware.describe()}"
    assert f"cannot run this exploration{has}" in caplog.text
    store(queue.database, "own", report=make_report("Another device").model_dump(mode="json"), fingerprint="other")
    assert ends(own.watch)
    needs = "it is none with the hardware that this exploration started on (Another device, 1.0 GiB, torch 2.13)"
    assert f"cannot run this exploration: {needs}{has}" in caplog.text


def test_the_log_says_who_holds_the_device_and_what_to_do(queue: Queue, own: OwnJob, ending: Ending) -> None:
    submit(queue)
    own._worker._profiler.held_by = "cpu is in use by process 7 of user ann"
    ending.actions[0.2] = ending.set
    own.watch(ending)
    told = [event.message for event in read_events(queue.database, "own") if event.code is EventCode.WAITING]
    assert told == [
        "Waiting: the device is in use: cpu is in use by process 7 of user ann; "
        "wait for its end, end it, or name another device with --device"
    ]


class Ending(threading.Event):
    """An event on a clock of its own, which moves when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.waits: list[float] = []
        self.actions: dict[float, Callable[[], Any]] = {}

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.now += timeout
        for at in [at for at in self.actions if self.now > 1000.0 + at]:
            self.actions.pop(at)()
        assert self.now < 1100.0, "nothing has ended it"
        return self.is_set()

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    """In place of the module's clock."""
    ending = Ending()
    monkeypatch.setattr(serving, "time", ending)
    return ending


def test_a_ready_worker_has_ten_seconds_to_take_its_job_from_when_it_waits_for_it(
    queue: Queue, worker: JobWorker, ending: Ending
) -> None:
    worker.hardware = make_report().hardware
    own = OwnJob(worker, "own")
    ending.actions = {20.0: lambda: submit(queue), 25.0: lambda: run_by(queue, "me")}
    ending.actions[40.0] = ending.set
    own.watch(ending)
    assert not own.is_refused
    assert all(0.1 <= seconds <= 0.5 for seconds in ending.waits), "it looks some times a second"
    queue.request_cancel("own")
    submit(queue, "other", seed=1)
    ending.clear()
    began = ending.now
    waiting = OwnJob(worker, "other")
    waiting.watch(ending)
    assert waiting.is_refused
    assert 10.0 < ending.now - began <= 11.0


def test_an_idle_worker_that_holds_the_device_has_two_seconds_before_the_job_is_told(
    queue: Queue, worker: JobWorker, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._profiler.held_by = "another"
    submit(queue)
    told: list[float] = []
    own = OwnJob(worker, "own")
    tell = own._tell

    def note(waited: float) -> None:
        tell(waited)
        if own._is_told:
            told.append(waited)

    monkeypatch.setattr(own, "_tell", note)
    ending.actions[9.0] = ending.set
    own.watch(ending)
    assert 2.0 < told[0] <= 2.5
    assert len([event for event in read_events(queue.database, "own") if event.code is EventCode.WAITING]) == 1


def test_a_worker_that_lost_its_device_before_does_not_refuse_a_job(
    queue: Queue, worker: JobWorker, ending: Ending
) -> None:
    worker.hardware = make_report().hardware
    worker._profiler.held_by = "cpu is in use by process 7 of user ann"
    queue.enqueue(make_request(), job_id="own")
    own = OwnJob(worker, "own")
    ending.actions[30.0] = ending.set
    own.watch(ending)
    assert (own.is_refused, own._is_told) == (False, True)


def test_a_job_that_does_not_end_is_left_after_six_seconds(
    queue: Queue, worker: JobWorker, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(queue)
    run_by(queue, "me")
    with closed_stdin(monkeypatch):
        OwnJob(worker, "own").end_with_stdin(ending)
    assert ending.is_set()
    assert get_job(queue.database, "own").cancel_requested
    assert 6.0 <= ending.now - 1000.0 <= 6.5
