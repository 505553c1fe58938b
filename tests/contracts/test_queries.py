"""The queries of docs/database.md, as they are printed there, on both databases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bexp.explorer.records.event import Progress, recommendation_event
from bexp.explorer.records.measurement import Outcome
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, get_job
from bexp.storage.owners import USUAL_SCOPES, Caller
from bexp.storage.queue import Queue
from bexp.storage.schema import VERSION_TABLE
from bexp.storage.tables import metadata
from tests.contracts.jobs import claim_one
from tests.contracts.samples import make_recommendation, make_request, make_trial

PAGE = (Path(__file__).parents[2] / "docs" / "database.md").read_text()
BEST, PROGRESS, OUT_OF_MEMORY, OWNED, WORKED = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TEAM = Caller("team-a", USUAL_SCOPES)
MINE, OTHER = "3f9c2a7d41b05e68", "0123456789abcdef"
WORKER = "gpu-7-4711-cuda0-9e1c"


@pytest.fixture
def stored(database: Database) -> Database:
    """A finished exploration of an owner, and one of another that has only been submitted."""
    queue = Queue(database)
    queue.enqueue(make_request(), by=TEAM, job_id=MINE)
    lease = claim_one(queue, WORKER).lease
    for number, size in ((0, 2), (1, 4)):
        trial, best = make_trial(number), make_recommendation(size)
        queue.record(lease, Progress(events=(recommendation_event(best),), trial=trial, recommendation=best))
    for number in (2, 3):
        queue.record(lease, Progress(trial=make_trial(number, Outcome.OUT_OF_MEMORY)))
    queue.finish(lease, JobState.SUCCEEDED)
    queue.enqueue(make_request(seed=1), job_id=OTHER)
    return database


def rows(database: Database, query: str) -> list[dict[str, Any]]:
    with database.read() as connection:
        return [dict(row._mapping) for row in connection.exec_driver_sql(query)]


def test_the_best_of_each_job(stored: Database) -> None:
    assert rows(stored, BEST) == [
        {
            **{"id": MINE, "model_name": "tiny", "micro_batch_size": 4, "confidence": 45},
            **{"performance": 1.2, "tokens_per_second": 1000.0, "peak_bytes": 1 << 20},
        }
    ]


def test_the_progress_of_a_job(stored: Database) -> None:
    found = rows(stored, PROGRESS)
    assert [(row["micro_batch_size"], row["recompute"], row["confidence"]) for row in found] == [
        (2, "none", 45),
        (4, "none", 45),
    ]
    assert found[0]["at"] <= found[1]["at"]


def test_what_ran_out_of_memory(stored: Database) -> None:
    assert [tuple(row.values()) for row in rows(stored, OUT_OF_MEMORY)] == [("tiny", 3, 1), ("tiny", 4, 1)]


def test_what_an_owner_has_explored(stored: Database) -> None:
    assert [tuple(row.values()) for row in rows(stored, OWNED)] == [(MINE, "succeeded", "tiny", 4, 0.0)]


def test_what_a_worker_has_run(stored: Database) -> None:
    (row,) = rows(stored, WORKED)
    assert (row["job_id"], str(row["attempt"])) == (MINE, "1")
    assert WORKER in row["message"]
    assert get_job(stored, OTHER).worker is None


def test_the_page_names_each_table() -> None:
    assert {*metadata.tables, VERSION_TABLE} <= set(re.findall(r"`(\w+)`", PAGE))
