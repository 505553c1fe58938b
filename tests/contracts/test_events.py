"""The event log on both databases: what another row holds is stored there alone, and read with its event."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from bexp.explorer.records.event import EventCode, EventDraft, Progress, end_event, recommendation_event
from bexp.explorer.records.recommendation import Note, NoteCode
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.leases import Lease
from bexp.storage.queue import Queue
from bexp.storage.tables import events
from tests.contracts.jobs import ANSWER, claim_one, recommendation_rows
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


def test_a_row_is_written_whenever_a_value_changes_and_only_then(database: Database, lease: Lease) -> None:
    """A line of the log may stay away, because its text shows fewer digits than the row has."""
    queue, best = Queue(database), make_recommendation(3)
    trial = EventDraft(code=EventCode.TRIAL, message="trial")
    changes: list[dict[str, Any]] = [
        *({}, {}, {"performance": 1.2001}, {"confidence": 46}, {"measured_peak_bytes": 1 << 21}),
        *({}, {"tokens_per_second": 1000.25}, {"notes": (Note(code=NoteCode.BUDGET, text="a note"),)}),
        *({"candidate": best.candidate.model_copy(update={"loss": "chunked"})}, {"step_seconds": 2.0}),
    ]
    for change in changes:
        best = best.model_copy(update=change)
        queue.record(lease, Progress(events=(trial, trial), recommendation=best))
    events = read_events(database, lease.job_id, after=NUM_EVENTS)
    rows = recommendation_rows(database, lease.job_id)
    assert [(row.seq, row.at) for row in rows] == [
        (events[2 * i + 1].seq, events[2 * i + 1].at) for i in (0, 2, 3, 4, 6, 8)
    ]
    assert [row.performance for row in rows] == [1.2, *[1.2001] * 5]
    last = rows[-1]
    assert (last.micro_batch_size, last.confidence, last.tokens_per_second, last.peak_bytes) == (
        3,
        46,
        1000.25,
        1 << 21,
    )
    assert last.candidate == {"micro_batch_size": 3, "attention_backend": "math", "num_query_groups": 4} | {
        **{"recompute": "none", "context_parallel_size": 1, "loss": "chunked"}
    }


@pytest.mark.parametrize("with_answer", [True, False])
def test_the_last_row_is_the_answer_whatever_other_variants_had(
    database: Database, lease: Lease, with_answer: bool
) -> None:
    queue, trial = Queue(database), EventDraft(code=EventCode.TRIAL, message="trial")
    main, other = make_recommendation(3), make_recommendation(4)
    for best in (main, other):
        queue.record(lease, Progress((trial,), recommendation=best, is_main=best is main))
    job = get_job(database, lease.job_id)
    assert (job.recommendation, job.micro_batch_size) == (main, 3), "that of the main variant"
    variants = (ANSWER.variants[0].model_copy(update={"recommendation": main}),)
    answer = ANSWER.model_copy(update={"variants": variants})
    if with_answer:
        queue.finish(lease, JobState.SUCCEEDED, answer=answer)
    else:
        queue.finish(lease, JobState.CANCELLED)
    assert [row.micro_batch_size for row in recommendation_rows(database, lease.job_id)] == [3, 4, *[3] * with_answer]


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


def test_the_event_of_an_earlier_end_keeps_its_answer(database: Database, queue: Queue, lease: Lease) -> None:
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
    Queue(database).finish(lease, JobState.FAILED, error=given)
    assert get_job(database, lease.job_id).error == stored
