"""Programs of two databases on one device of a machine: each has it in its turn."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import psutil
import pytest

from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.workers import WorkerState, read_workers
from tests.acceptance.conftest import TINY, Machine, await_gone, profilers_of
from tests.waits import wait_until

pytestmark = pytest.mark.slow

ENDLESS = {"max_seconds": 600, "max_trials": 500, "confidence_target": 99}


@pytest.fixture
def worker(machine: Machine) -> subprocess.Popen[str]:
    """An idle worker of the machine's own database."""
    worker = machine.start("worker", "--device", "cpu")
    wait_until(lambda: "is ready" in machine.err(worker), "the worker's start")
    return worker


def explore_elsewhere(machine: Machine, **changes: object) -> subprocess.Popen[str]:
    """Start an exploration in another database of the same machine."""
    machine.environment["BEXP_DATABASE_URL"] = f"sqlite:///{machine.folder / 'other.db'}"
    try:
        return machine.start("explore", machine.configure(**changes), "--device", "cpu")
    finally:
        del machine.environment["BEXP_DATABASE_URL"]


def test_a_worker_names_the_exploration_that_has_its_device_and_has_it_when_that_is_killed(
    machine: Machine, worker: subprocess.Popen[str], open_url: Callable[[str], Database]
) -> None:
    database = open_url(machine.database_url)
    other = explore_elsewhere(machine, micro_batch_size="explore", batch_size=256, bta={}, budget=ENDLESS)
    wait_until(lambda: "BEXP102" in machine.out(other), "the exploration's start")
    (profiler,) = profilers_of(psutil.Process(other.pid))
    profiler.suspend()  # it leaves the processor to the others
    (holder,) = (child for child in profiler.parents() if "bexp.workers" in child.cmdline())
    brief = {**TINY, "micro_batch_size": 1, "budget": {"max_trials": 1}, "verify": False}
    job, _ = Queue(database).enqueue(ExplorationRequest.model_validate(brief))

    def is_waiting() -> bool:
        (found,) = read_workers(database)
        named = f"cpu is in use by process {holder.pid} of user " in (found.info.held_by or "")
        return found.state is WorkerState.WAITING and named

    wait_until(is_waiting, "the worker says whom it waits for")
    assert get_job(database, job.id).state is JobState.QUEUED
    left = [profiler, *holder.children()]
    holder.kill()
    await_gone(left, 300)
    assert other.wait(300) == 3
    assert "bexp: the worker was ended by SIGKILL" in machine.err(other)
    wait_until(lambda: get_job(database, job.id).state is JobState.SUCCEEDED, "the worker does not get the device")
