"""Real worker processes with a real profiler on the CPU: killed, cancelled, told to end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa

from bexp.explorer.dimensions.bta_tile import BTASpec
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.meshes.mesh import MeshPlan
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import Budget, ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.tables import jobs
from bexp.storage.trials import read_trials
from bexp.storage.workers import read_workers
from tests.waits import PATIENCE_SECONDS, wait_until
from tests.workers import held_worker

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = ModelSpec(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    vocab_size=256,
    seq_length=64,
    dtype="float32",
)
REQUEST = ExplorationRequest(
    model=MODEL,
    micro_batch_size=(1, 2, 3, 4, 6, 8),
    batch_size=48,
    bta=BTASpec(enable=False),
    recompute=(Recompute.NONE,),
    attention_backends=("math",),
    device_kind="cpu",
    budget=Budget(confidence_target=99, max_trials=6),
    verify=False,
)


class Workers:
    """Starts `python -m bexp.workers` and ends what is left of it. What `hold` names stands still once it has begun."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._environment = {**os.environ, "BEXP_DATABASE_URL": database.url, "TMPDIR": str(folder)}
        self._held = folder / "hold"
        self._environment[held_worker.VARIABLE] = str(self._held)
        self._environment["OMP_NUM_THREADS"] = "1"  # spinning threads of two tests at once slow each other down
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str, module: str = "workers") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, "--device", "cpu", *options]
        process = subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL, cwd=ROOT)
        self._started.append(process)
        return process

    def start_held(self, *options: str) -> subprocess.Popen[bytes]:
        """Start one that stands still in what `hold` names."""
        return self.start(*options, module=held_worker.__name__)

    def hold(self, trial: str) -> None:
        """Name the trial in which to stand still, before its job is there."""
        self._held.write_text(trial)

    def await_hold(self) -> None:
        """Wait until that trial has begun, which does not end by itself."""
        wait_until(lambda: not self._held.exists())

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(PATIENCE_SECONDS)


@pytest.fixture
def workers(sqlite_database: Database, tmp_path: Path) -> Iterator[Workers]:
    started = Workers(sqlite_database, tmp_path)
    yield started
    started.end()


def profilers(worker: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(worker.pid).children(recursive=True)


def components(trials: list[Trial]) -> list[str]:
    return [measured.component.key for trial in trials for measured in trial.measurement.components]


def test_a_killed_worker_is_replaced_by_one_that_resumes(sqlite_database: Database, workers: Workers) -> None:
    job, _ = Queue(sqlite_database).enqueue(REQUEST)
    workers.hold("2")
    first = workers.start_held()
    workers.await_hold()
    orphans = profilers(first)
    assert orphans
    first.send_signal(signal.SIGKILL)
    first.wait(PATIENCE_SECONDS)
    for orphan in orphans:
        with suppress(psutil.NoSuchProcess):
            orphan.resume()
    assert psutil.wait_procs(orphans, timeout=PATIENCE_SECONDS)[1] == [], "a profiler outlives its worker"
    before = [stored.trial for stored in read_trials(sqlite_database, job.id)]
    assert len(before) == 2
    told = read_events(sqlite_database, job.id)
    assert get_job(sqlite_database, job.id).state is JobState.RUNNING
    with sqlite_database.begin() as connection:  # rather than wait for the lease to run out
        past = sqlite_database.clock(timedelta(seconds=-1))
        connection.execute(sa.update(jobs).values(lease_expires_at=past))

    second = workers.start("--max-jobs", "1")
    assert second.wait(PATIENCE_SECONDS) == 0
    done = get_job(sqlite_database, job.id)
    assert done.state is JobState.SUCCEEDED
    assert done.attempt == 2
    trials = [stored.trial for stored in read_trials(sqlite_database, job.id)]
    assert trials[: len(before)] == before
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len(trials) > len(before)
    events = read_events(sqlite_database, job.id)
    repeats = {
        event.data["trial"] for event in events if re.search("components? again", event.message)
    }  # the host is noisy
    measured = components([trial for trial in trials if trial.number not in repeats])
    assert len(measured) == len(set(measured)), "a stored result was measured again"

    assert events[: len(told)] == told
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    codes = [int(event.code) for event in events]
    assert codes[len(told)] == 106
    assert [codes.count(once) for once in (101, 102, 103, 104, 106, 401)] == [1] * 6
    numbers = [event.data["trial"] for event in events if event.code in {201, 301}]
    assert numbers == [trial.number for trial in trials]


def test_a_cancelled_job_frees_the_device_and_a_told_worker_puts_back_the_next(
    sqlite_database: Database, workers: Workers
) -> None:
    queue = Queue(sqlite_database)
    cancelled, _ = queue.enqueue(REQUEST)
    workers.hold("1")
    worker = workers.start_held()
    workers.await_hold()
    busy = profilers(worker)
    queue.request_cancel(cancelled.id)
    wait_until(lambda: get_job(sqlite_database, cancelled.id).state is JobState.CANCELLED)
    assert psutil.wait_procs(busy, timeout=PATIENCE_SECONDS)[1] == [], "the device is not free"

    workers.hold("1")
    other = MODEL.model_copy(update={"seq_length": 32})  # for which nothing that was measured is reused
    job, _ = queue.enqueue(REQUEST.model_copy(update={"model": other}))
    workers.await_hold()
    busy = profilers(worker)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_SECONDS) == 0
    assert psutil.wait_procs(busy, timeout=PATIENCE_SECONDS)[1] == []
    put_back = get_job(sqlite_database, job.id)
    assert (put_back.state, put_back.worker) == (JobState.QUEUED, None)
    assert read_trials(sqlite_database, job.id) != []
    assert read_workers(sqlite_database) == []


def test_a_mesh_whose_whole_model_is_cancelled_has_the_answer_of_its_stored_blocks_and_is_resumed(
    sqlite_database: Database, workers: Workers
) -> None:
    queue = Queue(sqlite_database)
    mesh = {"num_devices": 2, "batch_size": 8, "micro_batch_size": (2,), "verify": True}
    asked = REQUEST.model_dump(exclude_unset=True) | mesh | {"parallelism": {"tensor": 2}, "bta": {"enable": False}}
    job, _ = queue.enqueue(ExplorationRequest.model_validate(asked))
    workers.hold("whole")
    first = workers.start_held("--group", "--device", "cpu,cpu")
    workers.await_hold()
    ranks = profilers(first)
    queue.request_cancel(job.id)
    wait_until(lambda: get_job(sqlite_database, job.id).state is JobState.CANCELLED)
    assert psutil.wait_procs(ranks, timeout=PATIENCE_SECONDS)[1] == [], "a rank waits for another"
    before = [stored.trial for stored in read_trials(sqlite_database, job.id)]
    assert len(before) >= 2, "exchanges and blocks"
    assert {trial.shared_run for trial in before} == {None}, "no whole model was stored"
    composed = get_job(sqlite_database, job.id).recommendation
    assert composed is not None
    queue.resume(job.id)
    wait_until(lambda: get_job(sqlite_database, job.id).state is JobState.SUCCEEDED)
    done = get_job(sqlite_database, job.id)
    assert done.state is JobState.SUCCEEDED
    trials = [stored.trial for stored in read_trials(sqlite_database, job.id)]
    assert trials[: len(before)] == before, "nothing stored is measured again"
    assert all(trial.shared_run is not None for trial in trials[len(before) :])
    found = done.recommendation
    assert found is not None
    assert found.whole_model is not None
    assert found.whole_model.measurement.num_micro_batches == 4, "both devices share each sequence"
    assert isinstance(found.plan, MeshPlan)
    assert found.plan.tokens_per_second == pytest.approx(2 * found.tokens_per_second)
    assert (found.candidate, found.composed_tokens_per_second) == (
        composed.candidate,
        composed.composed_tokens_per_second,
    )
