from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import sqlalchemy as sa

from bexp.storage.database import Database, open_database
from bexp.storage.jobs import JobState, get_job, list_jobs
from bexp.storage.queue import Queue
from bexp.storage.schema import VERSION_TABLE
from bexp.workers.__main__ import main
from bexp.workers.devices.lock import DeviceLocks
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.process.interface import ProfilerError
from bexp.workers.serving import SERVICE_FAILED, database_limits, listen, serve_workers
from tests.contracts.samples import make_request
from tests.waits import PATIENCE_SECONDS
from tests.workers.fakes import FakeProfiler, fake_explore


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class BrokenProfiler(FakeProfiler):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def start(self) -> None:
        raise self.error


def make_worker(database: Database, profiler: FakeProfiler) -> JobWorker:
    return JobWorker(Queue(database), profiler, "cpu", explore=fake_explore)


def test_each_device_runs_a_job_at_the_same_time(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    for _ in range(2):
        queue.enqueue(make_request())
    together = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def meet(plan: object) -> None:
        together.wait()

    profilers = [FakeProfiler(), FakeProfiler()]
    for profiler in profilers:
        profiler.before_measure = meet
    workers = [make_worker(sqlite_database, profiler) for profiler in profilers]
    assert serve_workers(workers, max_jobs=1) == 0
    assert [job.state for job in list_jobs(sqlite_database)[0]] == [JobState.SUCCEEDED] * 2


@pytest.mark.parametrize("error", [ProfilerError("the device fell off the bus"), OSError("too many open files")])
def test_a_broken_device_leaves_the_others_at_work(sqlite_database: Database, error: Exception) -> None:
    Queue(sqlite_database).enqueue(make_request())
    workers = [make_worker(sqlite_database, BrokenProfiler(error)), make_worker(sqlite_database, FakeProfiler())]
    assert serve_workers(workers, max_jobs=1) == SERVICE_FAILED
    assert [job.state for job in list_jobs(sqlite_database)[0]] == [JobState.SUCCEEDED]


def test_a_worker_ends_in_one_line_when_a_later_version_has_upgraded_the_database(
    sqlite_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    job, _ = Queue(sqlite_database).enqueue(make_request())
    with sqlite_database.begin() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    assert serve_workers([make_worker(sqlite_database, FakeProfiler())], max_jobs=1) == SERVICE_FAILED
    assert caplog.messages[-1].endswith("ends: a later version of bexp has upgraded the database; use that version")
    assert caplog.records[-1].exc_info is None
    assert get_job(sqlite_database, job.id).state is JobState.QUEUED


def test_an_idle_worker_is_told_of_a_job_and_keeps_within_its_connections(
    postgresql_url: str, open_url: Callable[[str], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bexp.workers.jobs.worker.MIN_POLL_SECONDS", 60.0)
    limits = database_limits(1)
    database = open_database(postgresql_url, limits)
    client = open_url(postgresql_url)
    others = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    counts: list[int] = []

    def count(plan: object) -> None:
        with client.read() as connection:
            counts.append((connection.scalar(others) or 0) - 1)

    profiler = FakeProfiler()
    profiler.before_measure = count
    worker = JobWorker(Queue(database), profiler, "cpu", explore=fake_explore)
    listener = listen([worker])
    thread = threading.Thread(target=worker.run, kwargs={"max_jobs": 1})
    try:
        while not listener.is_listening:
            time.sleep(0.01)
        thread.start()
        time.sleep(0.3)  # it has found no job by now and waits for a minute
        job, _ = Queue(client).enqueue(make_request())
        thread.join(PATIENCE_SECONDS)
        assert get_job(database, job.id).state is JobState.SUCCEEDED
        assert 2 <= max(counts) <= limits.max_connections == 4
    finally:
        worker.stop()
        listener.close()
        database.dispose()


def test_a_signal_ends_a_worker_that_is_just_about_to_wait(sqlite_database: Database) -> None:
    num_signals = 0

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_signals
        if event == "call" and frame.f_code is threading.Condition.wait.__code__ and not num_signals:
            waits = frame.f_back and frame.f_back.f_back  # behind the method of the event, which holds its lock here
            if waits and waits.f_code is serve_workers.__code__:
                num_signals += 1
                signal.raise_signal(signal.SIGTERM)

    worker = make_worker(sqlite_database, FakeProfiler())
    sys.setprofile(interrupt)
    try:
        assert serve_workers([worker], max_jobs=None) == 0
    finally:
        sys.setprofile(None)
        worker.stop()
    assert num_signals == 1


def test_a_signal_ends_all_workers_of_a_process_at_once(sqlite_database: Database) -> None:
    together = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    class Slow(FakeProfiler):
        def start(self) -> None:
            if together.wait() == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        def close(self) -> None:
            together.wait()

    workers = [make_worker(sqlite_database, Slow()) for _ in range(2)]
    assert serve_workers(workers, max_jobs=None) == 0


def test_a_worker_for_one_job_leaves_the_others_and_ends_with_it(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(sqlite_database)
    forgotten, _ = queue.enqueue(make_request())
    worker = JobWorker(queue, FakeProfiler(), "cpu", explore=fake_explore, name="me", max_poll_seconds=0.05)
    given = {"job_id": "own", "own_worker": "me"}
    submit = threading.Timer(0.3, queue.enqueue, [make_request()], given)  # the worker waits by then
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w"):
        monkeypatch.setattr("sys.stdin", stdin)
        submit.start()
        assert serve_workers([worker], None, own_job_id="own") == 0
    submit.join()
    assert get_job(sqlite_database, "own").state is JobState.SUCCEEDED
    assert get_job(sqlite_database, forgotten.id).state is JobState.QUEUED


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "tpu"], "tpu"),
        (["--device", "cuda:9999"], "cuda:9999"),
        (["--device", "cpu,cpu"], "names a device twice"),
        (["--device", "cpu", "--database-url", "mysql://host/name"], "mysql"),
        (["--device", "cpu", "--database-url", "sqlite:////proc/none/bexp.db"], "/proc/none"),
        (["--max-jobs", "none"], "none"),
        (["--max-jobs", "0"], "--max-jobs"),
        (["--num-devices", "0"], "'0'"),
        (["--num-devices", "2", "--device", "cpu"], "--num-devices"),
        (["--num-devices", "2", "--ray", "auto"], "--num-devices"),
    ],
)
def test_bad_input_is_named_as_bad_usage(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "named"), [("/none/table.jsonl", "No such file"), ("/dev/null", "is no recorded table")]
)
def test_a_file_that_is_no_table_is_a_usage_error(
    table: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", f"replay:{table}", "--database-url", f"sqlite:///{tmp_path / 'bexp.db'}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert named in said
    assert table in said


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://nobody@127.0.0.1:1/none", "the database cannot be used"),
        ("sqlite:///{folder}/notes.txt", "file is not a database"),
        ("sqlite:///{folder}/bexp.db", r"the database cannot be opened: \S.*: {folder}/bexp.db.upgrade.lock$"),
    ],
    ids=["away", "no database", "not to be upgraded"],
)
def test_a_database_that_cannot_be_used_is_named_without_a_traceback(
    url: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.txt").write_text("not a database " * 100)
    (tmp_path / "bexp.db.upgrade.lock").mkdir()  # as where the user may write nothing in its folder
    assert main(["--device", "cpu", "--database-url", url.format(folder=tmp_path)]) == SERVICE_FAILED
    assert re.search(said.format(folder=tmp_path), caplog.messages[-1])


def test_a_worker_waits_for_a_held_device_no_longer_than_it_may_and_names_the_holder(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder = DeviceLocks(["cpu"], directory=tmp_path)
    holder.acquire()
    monkeypatch.setenv("BEXP_DEVICE_WAIT_SECONDS", "0.2")
    assert main(["--device", "cpu", "--database-url", sqlite_database.url]) == SERVICE_FAILED
    holder.release()
    assert f"cpu is in use by process {os.getpid()} of user " in caplog.messages[-1]


def test_a_worker_on_a_cluster_without_ray_says_how_to_get_it(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    database = ["--database-url", sqlite_database.url]
    assert main(["--ray", "auto", "--device", "cpu", "--max-jobs", "1", *database]) == SERVICE_FAILED
    assert "pip install 'bexp[ray]'" in caplog.text
    with pytest.raises(SystemExit):
        main(["--ray", "auto", "--device", "replay:table.jsonl", *database])
