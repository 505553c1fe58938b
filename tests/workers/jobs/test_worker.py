from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.storage.database import Database, DatabaseLimits, open_database
from bexp.storage.jobs import JobState, get_job, list_jobs
from bexp.storage.notifications import QUEUED_JOBS, Listener
from bexp.storage.queue import Queue
from bexp.storage.schema import upgrade
from bexp.storage.workers import read_workers
from bexp.workers.jobs.worker import JobWorker, installed_software
from bexp.workers.process.interface import ProfilerError, ProfilerStartError
from tests.contracts.samples import make_report, make_request
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


def test_a_worker_starts_while_the_database_is_locked(
    sqlite_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_worker_goes_on_when_its_own_jobs_could_not_be_read(
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
