"""The event log on both databases: recommendations are stored as differences, and read from any place."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.storage.compact import CHAINED, dump_json
from bexp.storage.database import Database
from bexp.storage.events import BLOCK, read_events
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from bexp.storage.tables import events
from tests.contracts.samples import make_recommendation, make_request

NUM_EVENTS = 2 * BLOCK + 5


@pytest.fixture
def lease(database: Database) -> Lease:
    """A job whose log holds recommendations, some written together, with other events between them."""
    work = Queue(database)
    work.enqueue(make_request())
    claim = work.claim("a", device_kind="cpu", num_devices=1, fingerprint="f")
    assert claim is not None
    document = make_recommendation().model_dump(mode="json")
    seq = 2
    while seq < NUM_EVENTS:
        drafts = [
            EventDraft(code=code, message=f"line é {number}", data={"number": number, "recommendation": document})
            for number in range(seq + 1, seq + 4)
            for code in [EventCode.TRIAL if number % 5 == 0 else EventCode.RECOMMENDATION]
        ]
        seq = work.record(claim.lease, Progress(events=tuple(drafts[: NUM_EVENTS - seq])))
    return claim.lease


def test_each_place_of_a_log_can_be_read(database: Database, lease: Lease) -> None:
    log = read_events(database, lease.job_id, limit=1000)
    assert [event.seq for event in log] == list(range(1, NUM_EVENTS + 1))
    assert [(event.data["number"], event.message) for event in log[2:]] == [
        (seq, f"line é {seq}") for seq in range(3, NUM_EVENTS + 1)
    ]
    for after in range(NUM_EVENTS + 2):
        assert read_events(database, lease.job_id, after=after, limit=3) == log[after : after + 3]


def test_a_recommendation_takes_few_bytes_after_another_and_one_of_an_earlier_version_is_read(
    database: Database, lease: Lease
) -> None:
    log = read_events(database, lease.job_id, limit=1000)
    stored = sa.select(events.c.data).order_by(events.c.seq)
    with database.read() as connection:
        sizes = {data[0]: len(data) for data in connection.scalars(stored) if isinstance(data, bytes)}
        assert sizes[CHAINED] < 60
    here = (events.c.job_id == lease.job_id) & (events.c.seq == BLOCK + 3)
    plain = dump_json(log[BLOCK + 2].data).encode()
    with database.begin() as connection:
        connection.execute(sa.update(events).where(here).values(data=plain))
    assert read_events(database, lease.job_id, limit=1000) == log
