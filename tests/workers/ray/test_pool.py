"""Trials on a local Ray cluster of two nodes with a CPU each."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bexp.child_process import module_command
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database, open_database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.queue import Queue
from bexp.storage.trials import read_trials
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.process.interface import ProfilerInterruptedError
from bexp.workers.ray.pool import MOST_LOSSES, RayDevicePool
from tests.contracts.samples import make_report, make_request
from tests.waits import wait_until
from tests.workers.ray.fakes import DEADLY, GATE, OPEN, SLOW, open_fake, plan

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own: open sockets, deprecations
ROOT = Path(__file__).parents[3]


class Gate:
    """Slow trials wait until it is open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        (self._folder / OPEN).touch()

    def close(self) -> None:
        """Close it, and forget what has begun."""
        for file in self._folder.iterdir():
            file.unlink()

    def await_begun(self, *numbers: int) -> list[int]:
        """Wait until these slow trials have begun; return the ids of their processes."""
        files = [self._folder / f"{number}.begun" for number in numbers]
        wait_until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def module_gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))  # of actors: these files, whatever is installed
        patch.setenv(GATE, str(folder))
        yield Gate(folder)


@pytest.fixture
def gate(module_gate: Gate) -> Iterator[Gate]:
    """Closed at first."""
    module_gate.close()
    yield module_gate
    module_gate.open()


@pytest.fixture(scope="module")
def cluster(module_gate: Gate) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def make_pool(cluster: Any) -> Iterator[Callable[..., RayDevicePool]]:
    made: list[RayDevicePool] = []

    def make(open_profiler: Any = open_fake, **options: Any) -> RayDevicePool:
        pool = RayDevicePool(cluster.address, ("cpu",), open_profiler=open_profiler, **options)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()


def ready(pool: RayDevicePool, number: int, request: ExplorationRequest | None = None) -> RayDevicePool:
    """Started, with a job, and `number` actors."""
    pool.start()
    pool.begin(request or make_request())
    wait_until(lambda: pool.capacity == number)
    return pool


def test_trials_run_side_by_side_and_come_back_as_they_end(make_pool: Callable[..., RayDevicePool], gate: Gate) -> None:
    pool = ready(make_pool(), 2)
    assert pool.hardware() == make_report().hardware
    pool.submit(plan(0, SLOW))
    pool.submit(plan(1, SLOW))
    gate.await_begun(0, 1)
    gate.open()
    assert {pool.wait()[0].number, pool.wait()[0].number} == {0, 1}
    gate.close()
    pool.submit(plan(2, SLOW))
    pool.submit(plan(3, 2))
    assert pool.wait()[0].number == 3
    gate.open()
    assert pool.wait()[0].number == 2
    seconds = []
    for number in range(4, 24):
        started = time.monotonic()
        assert pool.measure(plan(number)).outcome is Outcome.OK
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 0.1, "no pause is part of each trial"
    assert pool.take_events() == []


def test_a_trial_whose_actors_die_has_that_for_its_outcome(make_pool: Callable[..., RayDevicePool]) -> None:
    pool = ready(make_pool(), 2)
    found = pool.measure(plan(0, DEADLY))
    assert found.outcome is Outcome.CRASHED
    assert f"{MOST_LOSSES + 1} devices of the cluster were lost" in str(found.reason)
    assert len(pool.take_events()) == MOST_LOSSES + 1
    assert pool.measure(plan(1)).outcome is Outcome.OK


@pytest.mark.usefixtures("gate")
def test_an_actor_that_does_not_answer_counts_as_lost(make_pool: Callable[..., RayDevicePool]) -> None:
    pool = ready(make_pool(setup_allowance_seconds=0.2), 2)
    found = pool.measure(plan(0, SLOW, timeout=0.2))
    assert found.outcome is Outcome.CRASHED
    assert "does not answer" in str(found.reason)


def test_an_interruption_ends_a_wait_until_the_next_start(make_pool: Callable[..., RayDevicePool], gate: Gate) -> None:
    pool = ready(make_pool(), 2)
    pool.submit(plan(0, SLOW))
    gate.await_begun(0)
    threading.Timer(0.2, pool.interrupt).start()
    with pytest.raises(ProfilerInterruptedError):
        pool.wait()  # for a trial that does not end
    with pytest.raises(ProfilerInterruptedError):
        pool.submit(plan(1))
    ready(pool, 2)
    assert pool.measure(plan(2)).outcome is Outcome.OK


def test_a_node_that_dies_within_a_trial(make_pool: Callable[..., RayDevicePool], cluster: Any, gate: Gate) -> None:
    node = cluster.add_node(num_cpus=1)
    pool = ready(make_pool(), 3)
    for number in range(3):
        pool.submit(plan(number, SLOW))
    pids = gate.await_begun(0, 1, 2)
    cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: not all(map(psutil.pid_exists, pids)))
    gate.open()
    done = [pool.wait() for _ in range(3)]
    assert sorted(p.number for p, _ in done) == [0, 1, 2]
    assert all(found.outcome is Outcome.OK for _, found in done)
    (event,) = pool.take_events()
    assert "was lost in trial" in event.message
    assert pool.capacity == 2


TINY: dict[str, Any] = {
    "model": {
        "name": "tiny",
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "seq_length": 64,
        "dtype": "float32",
    },
    "micro_batch_size": [1, 2, 3, 4, 6, 8],
    "batch_size": 48,
    "bta": {"enable": False},
    "recompute": ["none"],
    "attention_backends": ["math"],
    "device_kind": "cpu",
    "budget": {"confidence_target": 99, "max_trials": 12},
    "verify": False,
}


def test_a_worker_explores_on_the_cluster_with_real_profilers(cluster: Any, sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    job, _ = queue.enqueue(ExplorationRequest.model_validate(TINY))
    JobWorker(queue, RayDevicePool(cluster.address, ("cpu",)), "ray-cpu").run(max_jobs=1)
    done = get_job(sqlite_database, job.id)
    assert done.state is JobState.SUCCEEDED, [e.message for e in read_events(sqlite_database, job.id)]
    trials = [stored.trial for stored in read_trials(sqlite_database, job.id)]
    assert all(t.measurement.outcome is Outcome.OK for t in trials)
    keys = [m.component.key for t in trials for m in t.measurement.components]
    assert len(set(keys)) >= 5
    assert done.answer is not None
    timings = done.answer.timings
    assert timings["timed"] > 0
    parts = sum(seconds for name, seconds in timings.items() if name not in {"queue", "total", "profiler_idle"})
    assert parts == pytest.approx(timings["total"], rel=0.01)


def test_a_worker_that_is_terminated_gives_its_job_back(cluster: Any, tmp_path: Path) -> None:
    """Ray's own handler would end it at once."""
    url = f"sqlite:///{tmp_path}/bexp.db"
    environment = {**os.environ, "BEXP_DATABASE_URL": url}
    config = ROOT / "benchmarks" / "published" / "qwen2.5-0.5b.json"
    sizes = ("--seq-length", "64", "--batch-size", "4", "--target", "transformers")
    submitted = module_command("bexp.api.cli", "submit", str(config), *sizes)
    job_id = subprocess.run(submitted, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    database = open_database(url)
    command = module_command("bexp.api.cli", "worker", "--ray", cluster.address, "--device", "cpu")
    worker = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: get_job(database, job_id).state is JobState.RUNNING)
        worker.terminate()
        said = worker.communicate(timeout=120)[1]
    finally:
        worker.kill()
        database.dispose()
    assert (worker.returncode, "released" in said) == (0, True), said
