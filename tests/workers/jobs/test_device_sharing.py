"""Workers that share a device: who waits holds nothing, and who has it gives it back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.trial import TrialTask
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.workers import KnownWorker, WorkerState, read_workers
from bexp.workers.devices.lock import DeviceLocks
from bexp.workers.jobs import worker as worker_module
from bexp.workers.jobs.worker import JobWorker
from tests.contracts.samples import make_report, make_request
from tests.waits import PATIENCE_SECONDS, wait_until
from tests.workers.fakes import FakeProfiler, LockedProfiler, fake_explore

HELD = "cpu is in use by process 7 of user ann"


class HeldProfiler(FakeProfiler):
    """A fake whose device another process has while `held_by` is set to begin with."""

    def __init__(self, *, is_held: bool = False) -> None:
        super().__init__()
        self.is_held = is_held
        self.is_wanted = False
        self.times_taken = 0
        self.num_rests = 0

    @property
    def is_awaited(self) -> bool:
        return self.is_wanted

    def take(self) -> bool:
        self.times_taken += 1
        self.held_by = HELD if self.is_held else None
        return not self.is_held

    def rest(self) -> None:
        super().rest()
        self.num_rests += 1
        self.is_wanted = False


def make_worker(database: Database, profiler: FakeProfiler, device_wait_seconds: float = math.inf) -> JobWorker:
    return JobWorker(
        Queue(database),
        profiler,
        "cpu",
        explore=fake_explore,
        max_poll_seconds=0.05,
        device_wait_seconds=device_wait_seconds,
    )


@contextmanager
def running(worker: JobWorker) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(worker.run)
        try:
            yield
        finally:
            worker.stop()
            done.result(timeout=PATIENCE_SECONDS)


def listed(database: Database, worker: JobWorker) -> KnownWorker | None:
    return next((known for known in read_workers(database) if known.info.id == worker.id), None)


def is_listed_as(database: Database, worker: JobWorker, state: WorkerState) -> Callable[[], bool]:
    def check() -> bool:
        known = listed(database, worker)
        return known is not None and known.state is state

    return check


def has_succeeded(database: Database, job_id: str) -> Callable[[], bool]:
    return lambda: get_job(database, job_id).state is JobState.SUCCEEDED


def test_a_worker_whose_device_is_held_leaves_its_job_to_others_and_says_who_has_it(sqlite_database: Database) -> None:
    queue, profiler = Queue(sqlite_database), HeldProfiler()
    worker = make_worker(sqlite_database, profiler)
    with running(worker):
        wait_until(is_listed_as(sqlite_database, worker, WorkerState.IDLE))
        profiler.is_held = True
        job, _ = queue.enqueue(make_request())
        wait_until(is_listed_as(sqlite_database, worker, WorkerState.WAITING))
        known = listed(sqlite_database, worker)
        assert known is not None
        assert known.info.held_by == HELD
        assert known.info.fingerprint == make_report().hardware.fingerprint
        assert (get_job(sqlite_database, job.id).state, get_job(sqlite_database, job.id).attempt) == (
            JobState.QUEUED,
            0,
        )
        make_worker(sqlite_database, FakeProfiler()).run(max_jobs=1)
        assert get_job(sqlite_database, job.id).state is JobState.SUCCEEDED
        wait_until(is_listed_as(sqlite_database, worker, WorkerState.IDLE))
        assert profiler.num_rests, "it does not wait in line for nothing"
        own, _ = queue.enqueue(make_request(fresh=True))
        wait_until(is_listed_as(sqlite_database, worker, WorkerState.WAITING))
        profiler.is_held = False
        wait_until(has_succeeded(sqlite_database, own.id))
    assert profiler.calls.count("begin") == 1


def test_a_worker_that_never_had_its_device_stands_in_the_list_and_claims_nothing(sqlite_database: Database) -> None:
    job, _ = Queue(sqlite_database).enqueue(make_request())
    profiler = HeldProfiler(is_held=True)
    worker = make_worker(sqlite_database, profiler)
    with running(worker):
        wait_until(is_listed_as(sqlite_database, worker, WorkerState.WAITING))
        info = read_workers(sqlite_database)[0].info
        assert (info.held_by, info.device_kind, info.num_devices, info.devices) == (HELD, "cpu", 1, "cpu")
        assert (info.device_name, info.fingerprint) == ("", "")
        assert (worker.device_held, worker.hardware) == (HELD, None)
        assert get_job(sqlite_database, job.id).attempt == 0
        assert profiler.calls == []
        profiler.is_held = False
        wait_until(has_succeeded(sqlite_database, job.id))
        wait_until(is_listed_as(sqlite_database, worker, WorkerState.IDLE))
        assert read_workers(sqlite_database)[0].info.device_name == make_report().hardware.device_name


def test_an_idle_worker_gives_its_device_back_and_takes_it_for_a_job_alone(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "REST_SECONDS", 0.2)
    profiler = HeldProfiler()
    worker = make_worker(sqlite_database, profiler)
    with running(worker):
        wait_until(lambda: profiler.num_rests > 3)  # and so has asked for jobs as often
        assert profiler.times_taken == 1, "to measure it"
        job, _ = Queue(sqlite_database).enqueue(make_request())
        wait_until(has_succeeded(sqlite_database, job.id))
        rested = profiler.num_rests
        wait_until(lambda: profiler.num_rests > rested)


def test_an_idle_worker_keeps_its_device_for_some_seconds_unless_somebody_waits(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "REST_SECONDS", 600.0)
    profiler = HeldProfiler()
    with running(make_worker(sqlite_database, profiler)):
        job, _ = Queue(sqlite_database).enqueue(make_request())
        wait_until(has_succeeded(sqlite_database, job.id))
        wait_until(lambda: profiler.calls[-1] == "start")  # ready for the next one
        assert profiler.num_rests == 0
        profiler.is_wanted = True
        wait_until(lambda: profiler.num_rests == 1)


def test_who_waits_for_the_device_comes_before_the_next_job(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    for _ in range(2):
        queue.enqueue(make_request(fresh=True))
    profiler = HeldProfiler()
    rests_before: list[int] = []

    def want(task: TrialTask) -> None:
        profiler.is_wanted = task.number == 2 and not profiler.num_rests
        rests_before.append(profiler.num_rests)

    profiler.before_measure = want
    make_worker(sqlite_database, profiler).run(max_jobs=2)
    assert rests_before == [0, 0, 0, 1, 1, 1]
    begins = [number for number, call in enumerate(profiler.calls) if call == "begin"]
    between = profiler.calls[begins[0] + 1 : begins[1]]
    assert between == ["finish_job", "start"], "the device is not made ready for a job that does not come next"


def test_a_worker_that_has_measured_its_device_takes_a_job_before_others_have_it(sqlite_database: Database) -> None:
    Queue(sqlite_database).enqueue(make_request())
    profiler = HeldProfiler()
    profiler.is_wanted = True
    make_worker(sqlite_database, profiler).run(max_jobs=1)
    assert (profiler.calls.count("begin"), profiler.num_rests) == (1, 0)


def test_a_job_that_others_took_leaves_the_device(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "REST_SECONDS", 0.0)
    queue, profiler = Queue(sqlite_database), HeldProfiler()
    worker = make_worker(sqlite_database, profiler)
    take = profiler.take

    def take_late() -> bool:
        if worker.hardware is not None:
            queue.request_cancel(job.id)
        return take()

    monkeypatch.setattr(profiler, "take", take_late)
    job, _ = queue.enqueue(make_request())
    with running(worker):
        wait_until(lambda: profiler.times_taken == 2)
        rested = profiler.num_rests
        wait_until(lambda: profiler.num_rests > rested)
        assert profiler.calls.count("begin") == 0


def test_two_workers_of_two_databases_have_a_device_in_turns(
    sqlite_database: Database, postgresql_url: str, open_url: Callable[[str], Database], tmp_path: Path
) -> None:
    databases = [sqlite_database, open_url(postgresql_url)]
    ran: list[int] = []
    together: list[int] = []
    num_jobs = 4
    workers = []
    for number, database in enumerate(databases):
        profiler = LockedProfiler(tmp_path, together)

        def note(task: TrialTask, number: int = number, profiler: LockedProfiler = profiler) -> None:
            if task.number == 0:
                ran.append(number)
                wait_until(lambda: profiler.is_awaited or ran.count(1 - number) == num_jobs)

        profiler.before_measure = note
        workers.append(make_worker(database, profiler))
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(worker.run, max_jobs=num_jobs) for worker in workers]
        for database, worker in zip(databases, workers, strict=True):
            wait_until(is_listed_as(database, worker, WorkerState.IDLE))  # each has had the device to measure it
        for _ in range(num_jobs):
            for database in databases:
                Queue(database).enqueue(make_request(fresh=True))
        for each in done:
            each.result(100)
    assert ran in ([0, 1] * num_jobs, [1, 0] * num_jobs)


def test_a_worker_ends_while_it_waits_for_its_device(sqlite_database: Database, tmp_path: Path) -> None:
    holder = DeviceLocks(["cpu"], directory=tmp_path)
    holder.try_acquire()
    profiler = LockedProfiler(tmp_path, [])
    worker = make_worker(sqlite_database, profiler)
    with running(worker):
        wait_until(is_listed_as(sqlite_database, worker, WorkerState.WAITING))
    assert not holder.are_awaited
    holder.release()


def test_a_device_that_changes_is_listed_as_it_is_now(sqlite_database: Database) -> None:
    class Changing(FakeProfiler):
        name = "a"

        def hardware(self) -> HardwareSpec:
            return make_report().hardware.model_copy(update={"device_name": self.name})

    queue, profiler = Queue(sqlite_database), Changing()
    worker = make_worker(sqlite_database, profiler)
    with running(worker):
        wait_until(is_listed_as(sqlite_database, worker, WorkerState.IDLE))
        profiler.name = "b"
        profiler.failures = ["the device has changed"]
        job, _ = queue.enqueue(make_request())
        wait_until(has_succeeded(sqlite_database, job.id))
        wait_until(lambda: read_workers(sqlite_database)[0].info.device_name == "b")


def test_a_held_device_is_no_fault_of_the_device(sqlite_database: Database) -> None:
    """After a job that was put back another process has it: the worker waits in line, and does not end."""
    queue, profiler = Queue(sqlite_database), HeldProfiler()
    profiler.failures = ["the device fell off the bus"] * 2
    job, _ = queue.enqueue(make_request())
    close = profiler.close

    def close_and_lose() -> None:
        close()
        profiler.is_held = True

    profiler.close = close_and_lose  # type: ignore[method-assign]  # for what comes next
    worker = make_worker(sqlite_database, profiler)
    with running(worker):
        wait_until(lambda: profiler.is_held and profiler.held_by == HELD)
        profiler.is_held = False
        wait_until(has_succeeded(sqlite_database, job.id))
