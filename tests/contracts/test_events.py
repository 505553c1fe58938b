"""The event log on both databases: what another row holds is stored there alone, and read with its event."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from bexp.explorer.records.event import EventCode, EventDraft, Progress, recommendation_event
from bexp.explorer.search.event_messages import end_event
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from bexp.storage.tables import events, recommendations
from tests.contracts.jobs import ANSWER, claim_one
from tests.contracts.samples import make_recommendation, make_request

NUM_EVENTS = 20
OTHERS = ("0" * 16, "z" * 16)


@pytest.fixture
def lease(database: Database) -> Lease:
    """A job whose log holds recommendations, some written together, with other events between them.

    The ids of others are before and after its own, and their logs are longer.
    """
    work = Queue(database)
    for others in OTHERS:
        work.enqueue(make_request(), job_id=others)
        drafts = [EventDraft(code=EventCode.WARNING, message="of another", data={"answer": {}})] * NUM_EVENTS
        work.record(claim_one(work).lease, Progress(events=tuple(drafts)))
    work.enqueue(make_request(), job_id="m" * 16)
    claim = claim_one(work)
    seq = 2
    while seq < NUM_EVENTS:
        drafts = [
            EventDraft(code=EventCode.TRIAL, message=f"line é {number}", data={"number": number})
            if number % 5 == 0
            else recommendation_event(make_recommendation(number))
            for number in range(seq + 1, seq + 4)
        ]
        seq = work.record(claim.lease, Progress(events=tuple(drafts[: NUM_EVENTS - seq])))
    return claim.lease


def test_each_place_of_a_log_can_be_read(database: Database, lease: Lease) -> None:
    log = read_events(database, lease.job_id, limit=1000)
    assert [event.seq for event in log] == list(range(1, NUM_EVENTS + 1))
    for event in log[2:]:
        if event.seq % 5 == 0:
            assert (event.message, event.data) == (f"line é {event.seq}", {"number": event.seq})
        else:
            expected = recommendation_event(make_recommendation(event.seq))
            assert (event.code, event.message, event.data) == (expected.code, expected.message, expected.data)
    for after in range(NUM_EVENTS + 2):
        assert read_events(database, lease.job_id, after=after, limit=3) == log[after : after + 3]


def test_each_recommendation_has_a_row_that_is_written_with_its_event(database: Database, lease: Lease) -> None:
    with database.read() as connection:
        rows = connection.execute(sa.select(recommendations).order_by(recommendations.c.seq)).all()
    assert {row.job_id for row in rows} == {lease.job_id}
    log = [event for event in read_events(database, lease.job_id) if event.code is EventCode.RECOMMENDATION]
    assert [(row.seq, row.at) for row in rows] == [(event.seq, event.at) for event in log]
    first = rows[0]
    assert (first.micro_batch_size, first.performance, first.confidence) == (3, 1.2, 45)
    assert (first.tokens_per_second, first.peak_bytes) == (1000.0, 1 << 20)
    assert first.candidate["attention_backend"] == "math"
    assert None not in first.candidate.values()


def test_an_answer_is_stored_once_and_read_with_the_event_of_the_end(database: Database, lease: Lease) -> None:
    assert ANSWER.timings
    told = end_event(ANSWER.model_copy(update={"timings": {}}), 80)
    step = Progress(events=(told,), recommendation=ANSWER.recommendation, answer=ANSWER)
    Queue(database).finish(lease, JobState.SUCCEEDED, last=step)
    last = read_events(database, lease.job_id, after=NUM_EVENTS)[0]
    assert (last.code, last.data) == (EventCode.SUCCEEDED, told.data)
    job = get_job(database, lease.job_id)
    assert (job.answer, job.recommendation) == (ANSWER, ANSWER.recommendation)
    with database.read() as connection:
        stored = connection.scalar(
            sa.select(events.c.data).where(events.c.job_id == lease.job_id, events.c.seq == last.seq)
        )
    assert stored == {"answer": {"timings": {}}}


def test_the_event_of_an_earlier_end_keeps_its_answer(database: Database, lease: Lease) -> None:
    queue = Queue(database)
    nothing = ANSWER.model_copy(
        update={"variants": (ANSWER.variants[0].model_copy(update={"recommendation": None, "reason": "no"}),)}
    )
    queue.finish(lease, JobState.FAILED, last=Progress(events=(end_event(nothing, 80),), answer=nothing))
    before, others = read_events(database, lease.job_id), [read_events(database, name) for name in OTHERS]
    queue.resume(lease.job_id)
    assert get_job(database, lease.job_id).answer is None
    assert [read_events(database, name) for name in OTHERS] == others
    end = Progress(events=(end_event(ANSWER, 80),), answer=ANSWER)
    queue.finish(claim_one(queue).lease, JobState.SUCCEEDED, last=end)
    log = read_events(database, lease.job_id)
    assert log[: len(before)] == before
    assert [event.data["answer"] for event in log if event.code.ends_job] == [
        nothing.model_dump(mode="json"),
        ANSWER.model_dump(mode="json"),
    ]


@pytest.mark.parametrize(
    ("given", "stored"),
    [("a\0b", "ab"), ("\\u0000", "\\u0000"), ("\\\0", "\\"), ("é\ud800", "é?"), ("\n\x01", "\n\x01")],
)
def test_text_that_a_database_refuses_is_stored_without_it(
    database: Database, lease: Lease, given: str, stored: str
) -> None:
    draft = EventDraft.model_construct(code=EventCode.WARNING, message=given, data={"reason": given})
    Queue(database).record(lease, Progress(events=(draft,)))
    found = read_events(database, lease.job_id, after=NUM_EVENTS)[0]
    assert (found.message, found.data) == (stored, {"reason": stored})
    text = sa.text("SELECT data ->> 'reason' FROM bexp_events WHERE job_id = :job_id AND seq = :seq")
    with database.read() as connection:
        assert connection.scalar(text.bindparams(job_id=lease.job_id, seq=found.seq)) == stored
