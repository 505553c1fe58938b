from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from storage.database import Database
from storage.jobs import JobState, list_jobs
from storage.queue import Queue
from tests.contracts.samples import make_request
from tests.workers.fakes import FakeProfiler, fake_explore
from workers.__main__ import main, serve_workers
from workers.launcher import ProfilerError
from workers.worker import Worker


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class BrokenProfiler(FakeProfiler):
    def start(self) -> None:
        raise ProfilerError("the device fell off the bus")


def make_worker(database: Database, profiler: FakeProfiler) -> Worker:
    return Worker(Queue(database), profiler, "cpu", explore=fake_explore)


def test_each_device_runs_a_job_at_the_same_time(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    for _ in range(2):
        queue.enqueue(make_request())
    together = threading.Barrier(2, timeout=30)

    def meet(plan: object) -> None:
        together.wait()

    profilers = [FakeProfiler(), FakeProfiler()]
    for profiler in profilers:
        profiler.before_measure = meet
    workers = [make_worker(sqlite_database, profiler) for profiler in profilers]
    assert serve_workers(workers, max_jobs=1) == 0
    assert [job.state for job in list_jobs(sqlite_database)[0]] == [JobState.SUCCEEDED] * 2


def test_a_broken_device_leaves_the_others_at_work(sqlite_database: Database) -> None:
    Queue(sqlite_database).enqueue(make_request())
    workers = [make_worker(sqlite_database, BrokenProfiler()), make_worker(sqlite_database, FakeProfiler())]
    assert serve_workers(workers, max_jobs=1) == 1
    assert [job.state for job in list_jobs(sqlite_database)[0]] == [JobState.SUCCEEDED]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "tpu"], "tpu"),
        (["--device", "cuda:9999"], "cuda:9999"),
        (["--device", "cpu", "--database-url", "mysql://host/name"], "mysql"),
        (["--max-jobs", "none"], "none"),
        (["--max-jobs", "0"], "--max-jobs"),
    ],
)
def test_bad_input_is_a_usage_error_that_names_it(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_a_database_that_is_away_is_named_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--device", "cpu", "--database-url", "postgresql://nobody@127.0.0.1:1/none"]) == 1
    assert "the database cannot be used" in caplog.text
