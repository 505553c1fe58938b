from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.jobs import JobState, get_job, list_jobs
from bexp.storage.notifications import QUEUED_JOBS, Listener
from bexp.storage.queue import Queue
from bexp.storage.schema import upgrade
from bexp.storage.workers import WorkerInfo, forget_worker, read_workers, register_worker
from bexp.workers.jobs.worker import JobWorker, Registration, installed_software
from bexp.workers.process.interface import ProfilerError, ProfilerStartError
from tests.contracts.samples import make_report, make_request
from tests.contracts.samples import make_worker as make_info
from tests.waits import PATIENCE_SECONDS, Waits, wait_until
from tests.workers.fakes import FakeProfiler, fake_explore


def make_worker(database: Database, profiler: FakeProfiler) -> JobWorker:
    return JobWorker(Queue(database), profiler, "cpu", explore=fake_explore)


def test_a_profiler_is_started_before_each_job_and_closed_once_at_the_end(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    for _ in range(2):
        queue.enqueue(make_request())
    profiler = FakeProfiler()
    make_worker(sqlite_database, profiler).run(max_jobs=2)
    # A job's own `start` finds the process running.
    assert profiler.calls == ["start", "start", "begin", "finish_job", "start", "start", "begin", "finish_job", "close"]
    assert {job.state for job in list_jobs(sqlite_database)[0]} == {JobState.SUCCEEDED}


def test_a_worker_is_listed_while_it_lives(sqlite_database: Database) -> None:
    profiler = FakeProfiler()
    worker = make_worker(sqlite_database, profiler)
    seen = threading.Event()
    profiler.before_measure = lambda plan: seen.set()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(worker.run)
        queue = Queue(sqlite_database)
        job, _ = queue.enqueue(make_request())
        assert seen.wait(PATIENCE_SECONDS)
        assert [entry.info.id for entry in read_workers(sqlite_database)] == [worker.id]
        assert read_workers(sqlite_database)[0].info.fingerprint == make_report().hardware.fingerprint
        versions = make_report().hardware.versions.model_dump(exclude_none=True) | installed_software()
        assert read_workers(sqlite_database)[0].info.versions == versions
        assert versions["bexp"] == version("bexp")
        wait_until(lambda: get_job(sqlite_database, job.id).state is JobState.SUCCEEDED)
        worker.stop()
        done.result(timeout=PATIENCE_SECONDS)
    assert read_workers(sqlite_database) == []


def test_a_worker_stops_in_the_middle_of_a_trial(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler(hanging=[1])
    worker = make_worker(sqlite_database, profiler)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(worker.run)
        assert profiler.is_hanging.wait(PATIENCE_SECONDS)
        worker.stop()
        done.result(timeout=PATIENCE_SECONDS)
    assert get_job(sqlite_database, job.id).state is JobState.QUEUED
    assert profiler.calls[-1] == "close"


def test_a_worker_goes_on_after_a_cancelled_job(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    cancelled, _ = queue.enqueue(make_request())
    profiler = FakeProfiler(hanging=[1])
    worker = make_worker(sqlite_database, profiler)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(worker.run, max_jobs=2)
        assert profiler.is_hanging.wait(PATIENCE_SECONDS)
        queue.request_cancel(cancelled.id)
        profiler._hanging.clear()
        job, _ = queue.enqueue(make_request())
        done.result(timeout=PATIENCE_SECONDS)
    assert get_job(sqlite_database, cancelled.id).state is JobState.CANCELLED
    assert get_job(sqlite_database, job.id).state is JobState.SUCCEEDED
    # The profiler of a cancelled job may not be clean.
    kept = [call for call in profiler.calls if call in {"begin", "finish_job", "close"}]
    assert kept == ["begin", "close", "begin", "finish_job", "close"]


def test_a_worker_without_a_device_says_so(sqlite_database: Database) -> None:
    class NoDevice(FakeProfiler):
        def start(self) -> None:
            raise ProfilerError("no such device")

    profiler = NoDevice()
    with pytest.raises(ProfilerError, match="no such device"):
        make_worker(sqlite_database, profiler).run()
    assert profiler.calls == ["close"]
    assert read_workers(sqlite_database) == []


class Moody(FakeProfiler):
    """Its starts fail as listed; null is a start that succeeds."""

    def __init__(self, *starts: ProfilerError | None) -> None:
        super().__init__()
        self._starts = list(starts)

    def start(self) -> None:
        super().start()
        if self._starts and (error := self._starts.pop(0)) is not None:
            raise error


@pytest.mark.parametrize(
    "starts",
    [
        [ProfilerStartError("killed")] * 2,
        [None, None, ProfilerStartError("killed"), ProfilerError("the device fell off the bus")],
    ],
)
def test_a_profiler_that_cannot_start_for_a_while_does_not_end_its_worker(
    sqlite_database: Database, starts: list[ProfilerError | None]
) -> None:
    queue = Queue(sqlite_database)
    for _ in range(2):
        queue.enqueue(make_request())
    pauses = [0.01] * 3
    profiler = Moody(*starts)
    JobWorker(queue, profiler, "cpu", explore=fake_explore, start_pauses_seconds=pauses).run(max_jobs=2)
    assert {job.state for job in list_jobs(sqlite_database)[0]} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("starts", [[ProfilerStartError("killed")] * 99, [None, None, *[ProfilerError("lost")] * 99]])
def test_a_device_is_tried_again_for_five_minutes(
    sqlite_database: Database, starts: list[ProfilerError | None], caplog: pytest.LogCaptureFixture
) -> None:
    Queue(sqlite_database).enqueue(make_request())
    worker = make_worker(sqlite_database, Moody(*starts))
    worker._stopping = Waits()
    with pytest.raises(ProfilerError, match=r"killed|lost"):
        worker.run(max_jobs=2)
    pauses = [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert worker._stopping.seconds == pauses
    assert [message.rpartition("tried again in ")[2] for message in caplog.messages] == [f"{each} s" for each in pauses]


def test_a_worker_that_is_told_to_end_does_not_wait_for_its_device(sqlite_database: Database) -> None:
    worker = make_worker(sqlite_database, Moody(*[ProfilerStartError("killed")] * 99))
    worker._stopping = Waits(3)
    worker.run()
    assert worker._stopping.seconds == [1, 2, 4]


def test_a_worker_starts_beside_a_locked_database(sqlite_database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """As by a process that is frozen within a transaction."""
    job, _ = Queue(sqlite_database).enqueue(make_request())
    impatient = open_database(sqlite_database.url, DatabaseLimits(lock=timedelta(seconds=0.1)))
    with ThreadPoolExecutor(1) as pool:
        with sqlite_database.begin():
            upgrade(impatient)
            done = pool.submit(make_worker(impatient, FakeProfiler()).run, max_jobs=1)
            time.sleep(0.5)
            assert not done.done()
        done.result(timeout=PATIENCE_SECONDS)
    impatient.dispose()
    assert caplog.messages[0].endswith("could not report to the database: database is locked")
    assert get_job(sqlite_database, job.id).state is JobState.SUCCEEDED


def test_a_worker_outlives_a_failure_to_read_its_jobs(
    sqlite_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Their ids are read before each claim, and the database may be away just then."""
    job, _ = Queue(sqlite_database).enqueue(make_request())

    class Chosen:
        times = 0

        def __iter__(self) -> Iterator[str]:
            self.times += 1
            if self.times == 1:
                raise sa.exc.OperationalError("SELECT", {}, ConnectionError("refused\nIs it running?"))
            yield job.id

    queue = Queue(sqlite_database)
    JobWorker(queue, FakeProfiler(), "cpu", explore=fake_explore, job_ids=Chosen(), targets={"bexp": ""}).run(
        max_jobs=1
    )
    assert get_job(sqlite_database, job.id).state is JobState.SUCCEEDED
    assert "no job could be claimed: refused" in caplog.messages


@pytest.mark.parametrize(("is_told", "longest"), [(False, 1.0), (True, 4.0)])
def test_an_idle_worker_asks_ever_more_rarely(sqlite_database: Database, is_told: bool, longest: float) -> None:
    worker = make_worker(sqlite_database, FakeProfiler())
    listener = Listener(sqlite_database, QUEUED_JOBS, lambda _: worker.notice())
    listener.is_listening = is_told
    worker.rely_on(listener)
    pauses: list[float] = []

    class Noticed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            if len(pauses) == 8:
                worker.stop()
            return True

    worker._noticed = Noticed()
    worker.run()
    assert pauses == [min(0.05 * 2**number, longest) for number in range(8)]


WORKER = make_info("w")


def away() -> sa.exc.OperationalError:
    return sa.exc.OperationalError("UPDATE", {}, ConnectionError("refused\nIs it running?"))


def test_a_worker_is_listed_as_it_says_from_when_it_says_so(database: Database) -> None:
    with Registration(database) as registration:
        assert read_workers(database) == []
        registration.tell(replace(WORKER, held_by="cpu is in use"))
        (waiting,) = read_workers(database)
        assert waiting.info.held_by == "cpu is in use"
        registration.tell(WORKER)
        (idle,) = read_workers(database)
        assert (idle.info, idle.started_at) == (WORKER, waiting.started_at)
    assert read_workers(database) == []


def test_each_report_of_a_worker_reads_its_gpus(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[list[dict[str, Any]] | None] = [
        None,
        [{"device": "cuda:0", "busy_share": 0.93, "temperature_celsius": 61}],
    ]
    asked: list[Mapping[str, str]] = []

    def read(gpus: Mapping[str, str]) -> list[dict[str, Any]] | None:
        asked.append(gpus)
        return readings[len(asked) - 1]

    monkeypatch.setattr("bexp.workers.jobs.worker.read_gpus", read)
    registration = Registration(database, {"cuda:0": "GPU-1"})
    registration._ended = Waits(2)
    registration.tell(WORKER)
    assert [known.info.gpus for known in read_workers(database)] == [None]
    with registration:
        registration.tell(WORKER)  # nothing has changed, so that only the heartbeat reports
        registration._thread.join()
        assert [known.info.gpus for known in read_workers(database)] == readings[1:]
    assert asked == [{"cuda:0": "GPU-1"}] * 2


def test_a_worker_reports_three_times_in_the_15_seconds_that_it_lives_without(sqlite_database: Database) -> None:
    registration = Registration(sqlite_database)
    registration._ended = Waits(3)
    with registration:
        registration._thread.join()
    assert registration._ended.seconds == [5.0] * 3
    assert registration._thread.daemon, "a process that ends does not wait for it"


def test_a_worker_that_cannot_leave_the_list_ends(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise away()

    monkeypatch.setattr("bexp.workers.jobs.worker.forget_worker", fail)
    with Registration(sqlite_database) as registration:
        registration.tell(WORKER)
    assert "worker w could not be removed from the list: refused" in caplog.text


def test_a_worker_that_was_taken_off_the_list_is_on_it_again_and_so_is_what_it_could_not_say(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bexp.workers.jobs.worker.LIVE_WITHIN", timedelta(seconds=0.03))
    is_away = threading.Event()

    def register(database: Database, worker: WorkerInfo) -> None:
        if is_away.is_set():
            raise away()
        register_worker(database, worker)

    monkeypatch.setattr("bexp.workers.jobs.worker.register_worker", register)
    with Registration(sqlite_database) as registration:
        registration.tell(WORKER)
        forget_worker(sqlite_database, "w")
        wait_until(lambda: [known.info for known in read_workers(sqlite_database)] == [WORKER])
        is_away.set()
        registration.tell(replace(WORKER, held_by="cpu is in use"))
        wait_until(lambda: bool(caplog.messages))
        is_away.clear()
        wait_until(lambda: [known.info.held_by for known in read_workers(sqlite_database)] == ["cpu is in use"])
    assert caplog.messages[0] == "worker w could not report to the database: refused"
    assert read_workers(sqlite_database) == []
