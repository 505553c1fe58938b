"""A command that names a device, beside a worker of the same database that has nothing to do."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import psutil
import pytest

from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, list_jobs
from bexp.storage.queue import Queue
from bexp.storage.schema import upgrade
from bexp.storage.workers import read_workers
from bexp.workers.jobs.worker import JobWorker
from tests.acceptance.conftest import Machine
from tests.acceptance.test_explore import TABLES
from tests.contracts.jobs import store
from tests.waits import PATIENCE_SECONDS, wait_until
from tests.workers.fakes import FakeProfiler, fake_explore

pytestmark = pytest.mark.slow

CONFIGURATION = TABLES / "tables" / "olmoe-zipf.yaml"
RECORDED = f"replay:{TABLES / 'results' / 'tables' / 'olmoe-zipf.jsonl'}"


@pytest.fixture
def queue(machine: Machine, open_url: Callable[[str], Database]) -> Queue:
    database = open_url(machine.database_url)
    upgrade(database)
    return Queue(database)


@pytest.fixture
def idle(queue: Queue) -> Iterator[FakeProfiler]:
    """The device of a worker that asks for a job 20 times a second."""
    profiler = FakeProfiler()
    worker = JobWorker(queue, profiler, "cpu", explore=fake_explore, targets={"bexp": "0.1.0"}, max_poll_seconds=0.05)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: len(read_workers(queue.database)) == 1, "the worker's start")
    yield profiler
    worker.stop()
    thread.join(PATIENCE_SECONDS)


def test_the_device_that_a_command_names_measures_and_the_job_of_a_killed_one_waits_until_it_is_resumed(
    machine: Machine, queue: Queue, idle: FakeProfiler
) -> None:
    explored = machine.run("explore", CONFIGURATION, "--device", RECORDED)
    killed = machine.start("explore", CONFIGURATION, "--device", RECORDED)

    def is_submitted() -> bool:
        for process in psutil.Process(killed.pid).children(recursive=True):
            process.suspend()  # before it has imported what it needs to begin
        return len(list_jobs(queue.database)[0]) == 2

    wait_until(is_submitted, "it is not submitted")
    killed.send_signal(signal.SIGSTOP)  # or it would see that its worker has died
    for process in psutil.Process(killed.pid).children(recursive=True):
        process.kill()
    killed.kill()
    killed.wait()
    (job,) = (job for job in list_jobs(queue.database)[0] if job.state is not JobState.SUCCEEDED)
    assert job.state is JobState.QUEUED, "its worker had not begun"
    store(queue.database, job.id, own_worker_until=None)  # rather than wait for 30 s
    queue.note_waiting(grace=timedelta(0), live_within=timedelta(0))  # the dead worker may have reported
    assert read_events(queue.database, job.id)[-1].message == "Waiting: its own worker has ended"
    resumed = machine.run("resume", "latest", "--device", RECORDED)
    for printed in (explored, resumed):
        answer = printed.rpartition("\n\n")[2]
        assert answer.startswith("Recommended micro_batch_size: ")
        assert "on NVIDIA H200, replayed" in " ".join(answer.splitlines()[:2])
    codes = re.findall(r"^BEXP([14]\d\d)", resumed, re.MULTILINE)
    assert codes[-3:] == ["102", "110", "401"], "it reuses what the first has measured"
    assert f"`bexp best {job.id} --json > best.json`" in " ".join(resumed.split())
    assert "begin" not in idle.calls
    assert {job.device_name for job in list_jobs(queue.database)[0]} == {"NVIDIA H200, replayed"}
