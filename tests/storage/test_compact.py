from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from bexp.explorer.search.explore import explore
from bexp.storage.compact import DEFLATED, PLAIN, pack, unpack
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.listing import list_jobs
from bexp.storage.queue import Queue
from bexp.storage.trials import read_all_trials
from bexp.workers.jobs.worker import Worker
from bexp.workers.replay.profiler import ReplayProfiler
from tests.contracts.samples import make_trial

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "tables" / "llama-8k.jsonl"
MOST_BYTES = 30_000


@pytest.mark.parametrize("text", ["", "x", "Exploration started by worker", "é" * 100, '{"a":1}'])
def test_a_text_is_read_back(text: str) -> None:
    assert unpack(pack(text)) == text


def test_a_document_is_stored_in_a_few_bytes_and_a_text_without_pattern_in_one_byte_more() -> None:
    document = json.dumps(make_trial(0).model_dump(mode="json"), separators=(",", ":"))
    assert pack(document)[0] == DEFLATED
    assert len(pack(document)) < len(document) / 5
    assert pack("~^") == bytes([PLAIN]) + b"~^"


def test_a_text_that_resembles_another_takes_few_bytes_and_needs_it_to_be_read() -> None:
    first, second = (json.dumps(make_trial(number).model_dump(mode="json")) for number in (0, 1))
    assert unpack(pack(second, first), first) == second
    assert len(pack(second, first)) < len(pack(second)) / 2
    assert unpack(pack("~^", first), first) == "~^"
    assert unpack(pack(second), first) == second


@pytest.mark.parametrize("stored", [b'{"a":1}', '{"a":1}'])
def test_what_an_earlier_version_stored_is_read_as_it_is(stored: bytes | str) -> None:
    assert unpack(stored) == '{"a":1}'


def test_a_value_stored_with_the_dictionary_of_the_first_version_is_read() -> None:
    """The dictionary can never change: what was stored with it could not be read any more."""
    assert unpack(bytes.fromhex(STORED)) == "Exploration 0123456789abcdef of llama-8k is queued"


STORED = "0173ad28c8c92f023b5f017410860930815b5826262503eb0350999d9393989ba86b910d2acec12766a40000"


def test_a_finished_job_with_thirty_trials_takes_at_most_30_kb(sqlite_database: Database) -> None:
    with sqlite_database.read() as connection:
        if not connection.exec_driver_sql("SELECT sqlite_compileoption_used('ENABLE_DBSTAT_VTAB')").scalar():
            pytest.skip("this SQLite does not tell how much room a table takes")
    before = _used_bytes(sqlite_database)
    profiler = ReplayProfiler(TABLE)
    asked = profiler.recording.header.request
    budget = asked.budget.model_copy(update={"max_trials": 30, "confidence_target": 99, "max_seconds": 50_000.0})
    queue = Queue(sqlite_database)
    queue.enqueue(asked.model_copy(update={"budget": budget, "sampler": "random", "verify": False}))
    Worker(queue, profiler, "replay", explore=partial(explore, clock=profiler.clock)).run(max_jobs=1)
    (job,) = list_jobs(sqlite_database)[0]
    assert job.state is JobState.SUCCEEDED
    assert len(read_all_trials(sqlite_database, job.id)) >= 30
    assert _used_bytes(sqlite_database) - before <= MOST_BYTES


def _used_bytes(database: Database) -> int:
    with database.read() as connection:
        own = "name <> 'bexp_workers' AND name NOT LIKE '%bexp_components%'"  # jobs share those
        return int(connection.scalar(sa.text(f"SELECT sum(pgsize - unused) FROM dbstat WHERE {own}")))
