"""How much room an exploration takes on SQLite, as plain rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from bexp.explorer.search.explore import explore
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, list_jobs
from bexp.storage.queue import Queue
from bexp.storage.quotas import sum_stored_bytes
from bexp.storage.trials import read_all_trials
from bexp.workers.jobs.worker import JobWorker
from bexp.workers.replay.profiler import ReplayProfiler
from tests.contracts.samples import make_request

TABLES = Path(__file__).parents[2] / "benchmarks" / "results" / "tables"
MOST_BYTES = 120_000


@pytest.mark.parametrize("table", ["llama-8k", "switch-like"])
def test_a_finished_job_with_thirty_trials_takes_at_most_120_kb(sqlite_database: Database, table: str) -> None:
    """A random search recommends after almost every trial. The second model has the most components."""
    with sqlite_database.read() as connection:
        if not connection.exec_driver_sql("SELECT sqlite_compileoption_used('ENABLE_DBSTAT_VTAB')").scalar():
            pytest.skip("this SQLite does not tell how much room a table takes")
    before = _used_bytes(sqlite_database)
    profiler = ReplayProfiler(TABLES / f"{table}.jsonl")
    asked = profiler.recording.header.request
    budget = asked.budget.model_copy(update={"max_trials": 30, "confidence_target": 99, "max_seconds": 50_000.0})
    queue = Queue(sqlite_database)
    queue.enqueue(asked.model_copy(update={"budget": budget, "sampler": "random", "seed": 3, "verify": False}))
    JobWorker(queue, profiler, "replay", explore=partial(explore, clock=profiler.clock)).run(max_jobs=1)
    (job,) = list_jobs(sqlite_database)[0]
    assert job.state is JobState.SUCCEEDED
    assert len(read_all_trials(sqlite_database, job.id)) >= 30
    used = _used_bytes(sqlite_database) - before
    assert used <= MOST_BYTES
    with sqlite_database.begin() as connection:
        assert sum_stored_bytes(sqlite_database, connection, job.owner, 1 << 60)[0] == pytest.approx(used, rel=0.1)


def test_a_job_that_measured_nothing_counts_about_what_it_takes(sqlite_database: Database) -> None:
    queue = Queue(sqlite_database)
    before = _used_bytes(sqlite_database)
    for _ in range(50):
        job, _ = queue.enqueue(make_request(fresh=True, labels={"a": "b"}))
        queue.request_cancel(job.id)
    used = _used_bytes(sqlite_database) - before
    with sqlite_database.begin() as connection:
        assert sum_stored_bytes(sqlite_database, connection, job.owner, 1 << 60)[0] == pytest.approx(used, rel=0.1)


def _used_bytes(database: Database) -> int:
    with database.read() as connection:
        own = "name <> 'bexp_workers' AND name NOT LIKE '%bexp_components%'"  # jobs share those
        return int(connection.scalar(sa.text(f"SELECT sum(pgsize - unused) FROM dbstat WHERE {own}")))
