from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa

from bexp.explorer.records.event import EventDraft, Progress
from bexp.explorer.records.measurement import Outcome, PhaseSeconds
from bexp.explorer.records.trial import Trial
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState, get_job
from bexp.storage.leases import Claim
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.tables import jobs
from bexp.storage.trials import read_trials
from bexp.workers.jobs import runner
from bexp.workers.jobs.runner import PHASES, JobEnd, JobTimings, run_job
from bexp.workers.process.interface import ProfilerError
from tests.contracts.samples import make_progress, make_report, make_request, make_worker
from tests.waits import PATIENCE_SECONDS, Clock
from tests.workers.fakes import FakeProfiler, fake_explore

FINGERPRINT = make_report().hardware.fingerprint


@pytest.fixture
def queue(sqlite_database: Database) -> Queue:
    return Queue(sqlite_database)


def claim_next(queue: Queue, owner: str = "a") -> Claim:
    claim = queue.claim(make_worker(owner, fingerprint=FINGERPRINT))
    assert claim is not None
    return claim


def run(queue: Queue, claim: Claim, profiler: FakeProfiler, explore: Any = fake_explore) -> JobEnd:
    return run_job(claim, queue, profiler, stopping=threading.Event(), explore=explore)


def codes(queue: Queue, job: Job) -> list[int]:
    events = read_events(queue.database, job.id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return [int(event.code) for event in events]


def expire(queue: Queue, job: Job) -> None:
    with queue.database.begin() as connection:
        past = queue.database.clock(timedelta(seconds=-1))
        connection.execute(sa.update(jobs).where(jobs.c.id == job.id).values(lease_expires_at=past))


def test_a_job_runs_to_its_answer(queue: Queue) -> None:
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler()
    assert run(queue, claim_next(queue), profiler) is JobEnd.SUCCEEDED
    done = get_job(queue.database, job.id)
    assert done.state is JobState.SUCCEEDED
    assert done.report == make_report()
    assert profiler.measured == [0, 1, 2]
    assert codes(queue, job) == [101, 102, 201, 201, 201, 401]
    assert done.answer is not None
    timings = done.answer.timings
    assert timings["build"] == 0.75
    assert timings["timed"] == 1.5
    assert timings["storage"] > 0
    # The fake's processes were ready before: the 15 s that it says of their start are not part of the job.
    assert timings["process_start"] < 15


def test_nothing_that_fits_is_a_failure_with_its_own_end(queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(seed=13))
    assert run(queue, claim_next(queue), FakeProfiler()) is JobEnd.FAILED
    done = get_job(queue.database, job.id)
    assert done.answer is not None
    assert (done.state, done.error) == (JobState.FAILED, "too large")
    assert codes(queue, job)[-1] == 402
    assert codes(queue, job).count(403) == 0


def test_a_replaced_profiler_is_an_event_of_the_same_step(queue: Queue) -> None:
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler(outcomes=[Outcome.OK, Outcome.CRASHED])
    run(queue, claim_next(queue), profiler)
    assert codes(queue, job) == [101, 102, 201, 303, 201, 201, 401]
    replaced = read_events(queue.database, job.id)[3]
    assert replaced.data == {"trial": 1, "reason": "it was too large"}


def test_a_cancelled_job_stops_its_trial_soon(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Trial] = []
    monkeypatch.setattr(runner, "keep_components", lambda *given: kept.extend(given[-1]))
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler(hanging=[1])
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(run, queue, claim_next(queue), profiler)
        assert profiler.is_hanging.wait(PATIENCE_SECONDS)
        queue.request_cancel(job.id)
        assert end.result(timeout=PATIENCE_SECONDS) is JobEnd.CANCELLED
    assert get_job(queue.database, job.id).state is JobState.CANCELLED
    assert codes(queue, job) == [101, 102, 201, 404]
    assert [stored.trial for stored in read_trials(queue.database, job.id)] == kept
    assert len(kept) == 1, "what it has measured serves later jobs"


def test_a_worker_that_lost_its_lease_stops_and_writes_nothing(queue: Queue) -> None:
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler(hanging=[1])
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(run, queue, claim_next(queue), profiler)
        assert profiler.is_hanging.wait(PATIENCE_SECONDS)
        expire(queue, job)
        second = claim_next(queue, "b")
        assert end.result(timeout=PATIENCE_SECONDS) is JobEnd.LOST
    assert codes(queue, job) == [101, 102, 201, 106]
    resumed = FakeProfiler()
    assert run(queue, second, resumed) is JobEnd.SUCCEEDED
    assert resumed.measured == [1, 2]
    assert codes(queue, job) == [101, 102, 201, 106, 201, 201, 401]


def test_a_lease_that_is_lost_between_trials_stops_the_job(queue: Queue) -> None:
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler()

    def lose(plan: object) -> None:
        if len(profiler.measured) == 1:
            expire(queue, job)
            claim_next(queue, "b")

    profiler.before_measure = lose
    assert run(queue, claim_next(queue), profiler) is JobEnd.LOST
    assert codes(queue, job) == [101, 102, 201, 106]


def test_a_worker_that_shuts_down_puts_its_job_back(queue: Queue) -> None:
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler(hanging=[2])
    stopping = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(run_job, claim_next(queue), queue, profiler, stopping=stopping, explore=fake_explore)
        assert profiler.is_hanging.wait(PATIENCE_SECONDS)
        stopping.set()
        profiler.interrupt()
        assert end.result(timeout=PATIENCE_SECONDS) is JobEnd.RELEASED
    assert get_job(queue.database, job.id).state is JobState.QUEUED
    assert len(claim_next(queue).history) == 2


@pytest.mark.parametrize(("version", "is_kept"), [("1", True), ("2", False)])
def test_what_other_versions_measured_is_not_kept_for_later_jobs(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, version: str, is_kept: bool
) -> None:
    def claim_with(installed: str) -> Claim:
        claim = queue.claim(make_worker(fingerprint=FINGERPRINT, versions={"library": installed}))
        assert claim is not None
        return claim

    queue.enqueue(make_request())
    first = claim_with("1")
    queue.record(first.lease, make_progress(0))
    queue.release(first.lease)
    resumed = claim_with(version)
    kept: list[Trial] = []
    monkeypatch.setattr(runner, "keep_components", lambda *given: kept.extend(given[-1]))
    assert run(queue, resumed, FakeProfiler()) is JobEnd.SUCCEEDED
    assert (resumed.history[0] in kept) is is_kept


def test_a_profiler_that_died_while_idle_is_started_again(queue: Queue) -> None:
    queue.enqueue(make_request())
    profiler = FakeProfiler()
    profiler.failures = ["the profiler process of cpu was killed by SIGKILL"]
    assert run(queue, claim_next(queue), profiler) is JobEnd.SUCCEEDED
    assert profiler.calls[:4] == ["start", "begin", "start", "begin"]


def test_a_job_whose_device_is_unusable_is_put_back_with_the_reason(queue: Queue) -> None:
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler()
    profiler.failures = ["no such device"] * 2
    assert run(queue, claim_next(queue), profiler) is JobEnd.RELEASED
    assert get_job(queue.database, job.id).state is JobState.QUEUED
    assert read_events(queue.database, job.id)[-1].message == "Put back: no such device"


def raising(error: Exception) -> Callable[..., Iterator[Progress]]:
    def explore(request: object, report: object, measure: object, **_: object) -> Iterator[Progress]:
        yield Progress((EventDraft(code=201, message="so far so good"),))
        raise error

    return explore


def test_a_fault_of_the_search_is_tried_again_and_then_fails_the_job_alone(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database, QueueSettings(max_faults=2, retry_pause=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    faulty = raising(ZeroDivisionError("of all things"))
    assert run(queue, claim_next(queue), FakeProfiler(), faulty) is JobEnd.RELEASED
    assert get_job(queue.database, job.id).state is JobState.QUEUED
    assert run(queue, claim_next(queue), FakeProfiler(), faulty) is JobEnd.FAILED
    done = get_job(queue.database, job.id)
    assert (done.state, done.error) == (JobState.FAILED, "internal error: ZeroDivisionError: of all things")
    assert codes(queue, job) == [101, 102, 201, 302, 106, 201, 403]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_trouble_of_the_host_puts_the_job_back(queue: Queue, error: Exception) -> None:
    job, _ = queue.enqueue(make_request())
    assert run(queue, claim_next(queue), FakeProfiler(), raising(error)) is JobEnd.RELEASED
    assert get_job(queue.database, job.id).state is JobState.QUEUED
    assert read_events(queue.database, job.id)[-1].message == f"Put back: {str(error) or 'MemoryError'}"


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError("the disk"), ProfilerError("the device")])
def test_an_error_after_a_lost_lease_ends_the_attempt_quietly(queue: Queue, error: Exception) -> None:
    job, _ = queue.enqueue(make_request())
    claim = claim_next(queue)

    def lose(request: object, report: object, measure: object, **_: object) -> Iterator[Progress]:
        expire(queue, job)
        claim_next(queue, "b")
        raise error
        yield Progress()

    assert run(queue, claim, FakeProfiler(), lose) is JobEnd.LOST
    assert codes(queue, job) == [101, 102, 106]


class Failing(Queue):
    """Each write fails as often as `failures` says; with `commits` set, after it was stored."""

    def __init__(self, database: Database, failures: int, *, commits: bool) -> None:
        super().__init__(database)
        self.failures = dict.fromkeys(("pin", "record", "finish"), failures)
        self.commits = commits

    def _fail(self, name: str, write: Callable[[], Any]) -> Any:
        if self.failures[name]:
            self.failures[name] -= 1
            if self.commits:
                write()
            raise sa.exc.OperationalError("UPDATE", {}, Exception("the server\nis gone"))
        return write()

    def pin(self, *arguments: Any, **options: Any) -> Any:
        return self._fail("pin", lambda: super(Failing, self).pin(*arguments, **options))

    def record(self, *arguments: Any, **options: Any) -> Any:
        return self._fail("record", lambda: super(Failing, self).record(*arguments, **options))

    def finish(self, *arguments: Any, **options: Any) -> Any:
        return self._fail("finish", lambda: super(Failing, self).finish(*arguments, **options))


@pytest.mark.parametrize("commits", [False, True])
def test_a_job_holds_its_step_while_the_database_is_away(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, commits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether or not the write was stored before the connection broke, it is stored once, and nothing is lost."""
    monkeypatch.setattr(runner, "FIRST_PAUSE_SECONDS", 0.01)
    queue = Failing(sqlite_database, 2, commits=commits)
    job, _ = queue.enqueue(make_request())
    profiler = FakeProfiler()
    assert run(queue, claim_next(queue), profiler) in {JobEnd.SUCCEEDED, JobEnd.LOST}
    assert get_job(queue.database, job.id).state is JobState.SUCCEEDED
    assert codes(queue, job) == [101, 102, 201, 201, 201, 401]
    assert profiler.measured == [0, 1, 2]
    assert caplog.messages[0] == f"exploration {job.id} holds its step: (builtins.Exception) the server"


def test_a_database_that_stays_away_is_asked_ever_more_rarely_up_to_five_seconds(sqlite_database: Database) -> None:
    class Pauses(threading.Event):
        seconds: ClassVar[list[float | None]] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.seconds.append(timeout)
            return self.is_set()

    queue, stopping = Failing(sqlite_database, 7, commits=False), Pauses()
    queue.enqueue(make_request())
    end = run_job(claim_next(queue), queue, FakeProfiler(), stopping=stopping, explore=fake_explore)
    assert end is JobEnd.SUCCEEDED
    assert stopping.seconds[:7] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_a_worker_that_ends_while_the_database_is_away_leaves_the_job_to_its_lease(sqlite_database: Database) -> None:
    queue = Failing(sqlite_database, 1000, commits=False)
    job, _ = queue.enqueue(make_request())
    stopping = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(run_job, claim_next(queue), queue, FakeProfiler(), stopping=stopping, explore=fake_explore)
        while queue.failures["pin"] == 1000 and not end.done():
            time.sleep(0.01)
        assert not end.done()
        queue.release = queue.watch = queue.finish  # type: ignore[method-assign]  # no failures any more
        stopping.set()
        assert end.result(timeout=PATIENCE_SECONDS) is JobEnd.LOST
    assert get_job(queue.database, job.id).state is JobState.RUNNING


def test_phases_do_not_overlap_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr(runner, "time", clock)
    account = JobTimings(queued_seconds=3.0000014)
    with account.begin():
        clock.now += 2.0
    with account.spend("suggest"):
        clock.now += 3.0 + 10.0
        account.add_trial(10.0, PhaseSeconds(process_start=90.0, build=4.0, timed=5.0))
    with account.spend("storage"):
        clock.now += 1.0
    clock.now += 0.5
    timings = account.seconds()
    assert timings == {
        "queue": 3.000001,
        "process_start": 3.0,  # of the 90 s that the trial reports only one can have passed within it
        "build": 4.0,
        "warm_up": 0.0,
        "timed": 5.0,
        "messaging": 0.0,
        "suggest": 3.0,
        "storage": 1.0,
        "other": 0.5,
        "total": 16.5,
        "profiler_idle": 4.5,
    }
    assert sum(timings[name] for name in (*PHASES, "other")) == timings["total"]


def test_a_trial_beside_others_counts_for_the_time_that_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr(runner, "time", clock)
    account = JobTimings(queued_seconds=0.0)
    with account.spend("suggest"):
        clock.now += 4.0 + 0.5
        account.add_trial(4.0, PhaseSeconds(build=2.0, timed=6.0), beside_others=True)
        account.add_trial(0.0, PhaseSeconds(build=1.0, timed=7.0), beside_others=True)
        clock.now += 3.0
        account.add_trial(3.0, PhaseSeconds(build=0.5, timed=0.5, process_start=9.0), beside_others=True)
    timings = account.seconds()
    assert (timings["build"], timings["timed"], timings["suggest"], timings["total"]) == (1.5, 3.5, 0.5, 7.5)
    assert timings["process_start"] == 2.0


def test_a_trial_that_counts_more_than_was_waited_takes_nothing_from_another_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr(runner, "time", clock)
    account = JobTimings(queued_seconds=0.0)
    clock.now += 1.0
    account.add_trial(2.0, PhaseSeconds(build=3.0, process_start=4.0))
    timings = account.seconds()
    assert (timings["process_start"], timings["other"], timings["profiler_idle"]) == (0.0, 0.0, 0.0)
    assert (timings["build"], timings["total"]) == (3.0, 1.0)
