from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.storage import waiting
from bexp.storage.claims import ClaimQuota
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import Job, JobState, get_job, list_jobs
from bexp.storage.matching import needs_of
from bexp.storage.owners import USUAL_SCOPES, Caller
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.statistics import read_statistics
from bexp.storage.tables import events, jobs, workers
from bexp.storage.waiting import (
    BUSY,
    QueuePlace,
    describe_duration,
    find_place,
    find_places,
    find_waiting,
    list_waiting_ids,
)
from bexp.storage.workers import LIVE_WITHIN, forget_worker, register_worker
from tests.contracts.jobs import claim_one, expire
from tests.contracts.samples import make_progress, make_report, make_request, make_worker

NO_GRACE = timedelta(0)
FINGERPRINT = make_report().hardware.fingerprint


def add_worker(
    database: Database, worker_id: str = "w", kind: str = "cpu", fingerprint: str = FINGERPRINT, **targets: str
) -> None:
    targets = targets or {"bexp": "0.1.0"}
    register_worker(database, make_worker(worker_id, device_kind=kind, fingerprint=fingerprint, targets=targets))


def reasons(database: Database, job_id: str) -> list[str | None]:
    return [event.data["reason"] for event in read_events(database, job_id) if event.code == 105]


NO_GPU = "none with a cuda device is running (`bexp worker --device cuda:0` starts one)"


def test_a_job_says_once_what_it_waits_for(database: Database, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(device_kind="cuda"))
    for _ in range(3):
        queue.note_waiting(grace=NO_GRACE)
    assert reasons(database, job.id) == ["none is running"]
    add_worker(database)
    for _ in range(2):
        queue.note_waiting(grace=NO_GRACE)
    assert reasons(database, job.id) == ["none is running", NO_GPU]
    assert get_job(database, job.id).waiting_reason == NO_GPU
    add_worker(database, "gpu", "cuda")
    queue.note_waiting(grace=NO_GRACE)
    assert get_job(database, job.id).waiting_reason is None
    assert reasons(database, job.id)[2:] == [None]
    assert read_events(database, job.id)[-1].message == "A worker can run it now"
    forget_worker(database, "gpu")
    queue.note_waiting(grace=NO_GRACE)
    assert len(reasons(database, job.id)) == 4


def test_the_same_reason_of_many_jobs_is_noted_in_few_statements(database: Database, queue: Queue) -> None:
    told = [queue.enqueue(make_request(device_kind=kind))[0].id for kind in ("cuda", "cpu", "cuda", "cpu")]
    add_worker(database)
    changes: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        changes.extend([statement] if statement.startswith(("UPDATE", "INSERT")) else [])

    sa.event.listen(database.engine, "before_cursor_execute", note)
    queue.note_waiting(grace=NO_GRACE)
    sa.event.remove(database.engine, "before_cursor_execute", note)
    assert [reasons(database, job_id) for job_id in told] == [[NO_GPU], []] * 2
    assert [get_job(database, job_id).last_seq for job_id in told] == [2, 1, 2, 1]
    assert len(changes) == 2


def test_a_job_that_nobody_can_run_fails_in_the_end_and_names_its_need(database: Database, queue: Queue) -> None:
    wide = make_request(num_devices=4096, context_parallel={"sizes": [16]}, batch_size=4096)
    too_large, _ = queue.enqueue(wide, job_id="m" * 16)
    busy, _ = queue.enqueue(make_request())
    add_worker(database)
    queue.note_waiting(grace=NO_GRACE, max_wait=timedelta(hours=1))
    assert get_job(database, too_large.id).state is JobState.QUEUED
    queue.note_waiting(grace=NO_GRACE, max_wait=timedelta(0))
    assert get_job(database, too_large.id).state is JobState.QUEUED, "the reason may be gone when all workers report"
    with database.begin() as connection:
        connection.execute(sa.update(events).values(at=database.clock(-LIVE_WITHIN)))
    others = [queue.enqueue(make_request(device_kind="cuda"), job_id=name * 16)[0] for name in "az"]
    queue.note_waiting(grace=NO_GRACE)  # notes the others' reason just now
    queue.note_waiting(grace=NO_GRACE, max_wait=timedelta(0))
    assert {get_job(database, other.id).state for other in others} == {JobState.QUEUED}
    ended = get_job(database, too_large.id)
    assert ended.state is JobState.FAILED
    assert ended.error == "no worker could run it within 0 s: none with 16 devices is running"
    assert [event.code.ends_job for event in read_events(database, too_large.id)] == [False, False, True]
    assert get_job(database, busy.id).state is JobState.QUEUED


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (90, "90 s"),
        (7200, "2 h"),
        (7 * 86_400, "7 days"),
        (180, "3 min"),
        (60, "60 s"),
        (3600, "60 min"),
        (86_400, "24 h"),
    ],
)
def test_a_duration_is_told_in_its_own_unit(seconds: int, text: str) -> None:
    assert describe_duration(timedelta(seconds=seconds)) == text


def test_a_job_that_comes_after_the_clock_was_read_is_given_time(database: Database, queue: Queue, job: Job) -> None:
    for seconds, noted in ((1, []), (90, ["none is running"])):  # the clock was set back since
        with database.begin() as connection:
            connection.execute(sa.update(jobs).values(queued_at=database.clock(timedelta(seconds=seconds))))
        queue.note_waiting(grace=timedelta(seconds=30))
        assert [event.data["reason"] for event in read_events(database, job.id)[1:]] == noted


def test_a_fresh_job_is_given_time(database: Database, queue: Queue, job: Job) -> None:
    taken = claim_one(queue)
    other, _ = queue.enqueue(make_request())
    for seconds, noted in ((-29, []), (-31, ["none is running"])):  # since it was queued, or since its lease ran out
        with database.begin() as connection:
            at = database.clock(timedelta(seconds=seconds))
            connection.execute(sa.update(jobs).values(queued_at=at))
            connection.execute(sa.update(jobs).where(jobs.c.id == taken.job.id).values(lease_expires_at=at))
        queue.note_waiting(grace=timedelta(seconds=30))
        assert reasons(database, job.id) == reasons(database, other.id) == noted


def test_a_worker_that_went_silent_serves_nobody(database: Database, queue: Queue, job: Job) -> None:
    add_worker(database)
    queue.note_waiting(grace=NO_GRACE)
    assert reasons(database, job.id) == []
    queue.note_waiting(grace=NO_GRACE, live_within=timedelta(0))
    assert reasons(database, job.id) == ["none is running"]


def test_a_job_names_the_target_that_it_waits_for(database: Database, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(model=None, target="my-gpt"))
    add_worker(database, "reference")
    queue.note_waiting(grace=NO_GRACE)
    assert reasons(database, job.id) == ["none with the target 'my-gpt' is running"]
    for target in ("a-gpt", "z-gpt"):
        queue.enqueue(make_request(model=None, target=target))
    assert list_waiting_ids(database, "my-gpt") == [job.id]
    register_worker(database, make_worker("own", pid=2, fingerprint=FINGERPRINT, targets={"my-gpt": "2.0"}))
    queue.note_waiting(grace=NO_GRACE)
    assert get_job(database, job.id).waiting_reason is None


def test_a_table_that_is_replayed_is_no_worker_for_every_job(database: Database, queue: Queue, job: Job) -> None:
    on_a_gpu, _ = queue.enqueue(make_request(device_kind="cuda", seed=2))
    for kind in ("cuda", "cpu"):
        register_worker(database, make_worker(kind, device_kind=kind, device_name="A, replayed"))
    replayed = ", apart from recorded tables that are replayed: each takes what it can answer"
    queue.note_waiting(grace=NO_GRACE)
    assert reasons(database, job.id) == [f"none is running{replayed}"]
    register_worker(database, make_worker("w", device_kind="cpu", pid=3, fingerprint=FINGERPRINT))
    place = find_place(database, on_a_gpu)
    queue.note_waiting(grace=NO_GRACE)
    assert reasons(database, on_a_gpu.id)[-1] == f"{NO_GPU}{replayed}"
    assert place is not None and place.reason == f"{NO_GPU}{replayed}", "before it is noted"
    add_worker(database)
    queue.note_waiting(grace=NO_GRACE)
    assert get_job(database, job.id).waiting_reason is None


def test_a_job_of_transformers_says_how_to_install_it(database: Database, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(model=None, hf_config={"model_type": "llama"}, hf_seq_length=64))
    add_worker(database)
    queue.note_waiting(grace=NO_GRACE)
    (reason,) = reasons(database, job.id)
    assert reason == "none with the target 'transformers' is running (it needs pip install 'bexp[transformers]')"


def test_a_pinned_job_names_its_hardware(database: Database) -> None:
    queue = Queue(database, QueueSettings(lease=timedelta(0)))
    job, _ = queue.enqueue(make_request())
    claim = queue.claim(make_worker(fingerprint=FINGERPRINT))
    assert claim is not None
    queue.pin(claim.lease, make_report())
    add_worker(database, fingerprint="another")
    queue.note_waiting(grace=NO_GRACE)
    assert reasons(database, job.id) == [
        "none with the hardware that this exploration started on is running (A device, 1.0 GiB, torch 2.13)"
    ]
    with database.begin() as connection:
        connection.execute(sa.update(events).values(at=database.clock(-LIVE_WITHIN)))
    queue.note_waiting(grace=NO_GRACE, max_wait=NO_GRACE)  # which ends what nobody has begun
    assert get_job(database, job.id).state is JobState.RUNNING
    assert queue.claim(make_worker("b", fingerprint=FINGERPRINT)) is not None
    assert get_job(database, job.id).waiting_reason is None


def test_a_job_pinned_by_another_version_waits_like_any_other(database: Database, queue: Queue, job: Job) -> None:
    with database.begin() as connection:
        connection.execute(sa.update(jobs).values(report={"hardware": {}}, fingerprint="f"))
    add_worker(database)
    queue.note_waiting(grace=NO_GRACE)
    assert "hardware that this exploration started on" in (reasons(database, job.id)[0] or "")


def test_a_worker_that_was_frozen_and_goes_on_ends_the_reason(database: Database, queue: Queue, job: Job) -> None:
    """Its next trial may take minutes, and the log would end with what holds no more."""
    lease = claim_one(queue).lease
    expire(database, job.id)
    queue.note_waiting(grace=NO_GRACE)
    queue.heartbeat(lease)
    for _ in range(2):
        queue.note_waiting(grace=NO_GRACE)
    assert reasons(database, job.id) == ["none is running", None]
    assert get_job(database, job.id).waiting_reason is None
    assert queue.record(lease, make_progress(0), after_seq=2) == 5, "the worker knows of neither"


def test_a_reason_changes_although_the_clock_was_set_back(database: Database, queue: Queue, job: Job) -> None:
    register_worker(database, make_worker("silent"))
    with database.begin() as connection:
        later = database.clock(timedelta(hours=1))
        connection.execute(sa.update(jobs).values(queued_at=later))
        connection.execute(sa.update(workers).values(last_seen_at=later))
    queue.note_waiting()
    assert reasons(database, job.id) == ["none is running"], "it was seen before that, and not since"
    register_worker(database, make_worker("silent"))
    queue.note_waiting()
    assert reasons(database, job.id)[1:] == [None]


def test_several_callers_note_a_reason_once(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "NOTED_AT_ONCE", 2)
    queue = Queue(database)
    ids = [queue.enqueue(make_request())[0].id for _ in range(5)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: queue.note_waiting(grace=NO_GRACE), range(8)))
    assert [reasons(database, job_id) for job_id in ids] == [["none is running"]] * 5


def test_a_reason_of_a_quota_stays_until_the_quota_changes_and_no_other_reason_does() -> None:
    quota = ClaimQuota("the quota", holds=False)

    def reason_of(stored: str, **changes: object) -> list[tuple[str, str | None]]:
        waits = {**needs_of(make_request()), "own_worker": "", "is_held": False}
        row: Any = SimpleNamespace(**waits, id="j", owner="a", waiting_reason=stored)
        return find_waiting([make_worker()], [row], {"a": replace(quota, **changes)})  # type: ignore[arg-type]  # names of fields

    assert reason_of("the quota") == []
    for other in ("another", "zero"):
        assert reason_of(other) == [("j", None)]
        assert reason_of(other, holds=True) == [("j", "the quota")]


def test_a_job_says_when_its_workers_are_busy_and_who_has_their_device(database: Database, queue: Queue) -> None:
    add_worker(database, "a")
    register_worker(database, make_worker("r", device_name="A, replayed", fingerprint=FINGERPRINT))
    queue.enqueue(make_request())
    claim = claim_one(queue)
    job, _ = queue.enqueue(make_request())
    waits = make_worker("b", fingerprint="", device_name="", held_by="cpu is in use by process 7")

    def note() -> str | None:
        queue.note_waiting(grace=NO_GRACE, max_wait=NO_GRACE)
        return reasons(database, job.id)[-1]

    assert note() == BUSY
    register_worker(database, waits)
    assert note() == BUSY, "one that measures ends"
    queue.finish(claim.lease, JobState.FAILED)
    assert note() == BUSY, "between two claims a worker is free for a moment"
    forget_worker(database, "a")
    assert note() == "the device is in use: cpu is in use by process 7"
    register_worker(database, replace(waits, held_by="cpu is in use by process 8"))
    assert note() == "the device is in use: cpu is in use by process 8"
    assert read_statistics(database).num_without_worker == 0, "it has a worker, which waits itself"
    age_events(database)
    note()
    assert get_job(database, job.id).state is JobState.QUEUED, "it never fails for that"
    add_worker(database, "b")
    assert note() is None
    forget_worker(database, "b")
    forget_worker(database, "r")
    assert note() == "none is running"
    messages = [event.message for event in read_events(database, job.id)[1:]]
    assert messages == [
        "Waiting for a worker: each that can run it is busy",
        "Waiting: the device is in use: cpu is in use by process 7",
        "Waiting: the device is in use: cpu is in use by process 8",
        "A worker can run it now",
        "Waiting for a worker: none is running",
    ]


def age_events(database: Database) -> None:
    with database.begin() as connection:
        connection.execute(sa.update(events).values(at=database.clock(-LIVE_WITHIN)))


def test_the_place_of_a_job_is_that_in_the_order_of_claims(database: Database, queue: Queue) -> None:
    callers = {name: Caller(name, USUAL_SCOPES) for name in "ab"}
    priorities = {"a1": 0, "a2": 0, "a3": 5, "b1": 0, "b2": 1}
    for job_id, priority in priorities.items():
        queue.enqueue(make_request(), by=callers[job_id[0]], priority=priority, job_id=job_id)
    own, _ = queue.enqueue(make_request(), own_worker="mine")
    queue.enqueue(make_request(device_kind="cuda"), job_id="gpu")
    queue.enqueue(make_request(device_kind="cpu"), job_id="cpu")
    assert find_place(database, own) is None
    queued = {job_id: get_job(database, job_id) for job_id in (*priorities, "gpu")}
    assert find_place(database, queued["gpu"]) == QueuePlace(3, 6, None, "none is running"), (
        "nothing is known of when a worker comes"
    )
    places = {job_id: place.place for job_id in priorities if (place := find_place(database, queued[job_id]))}
    assert [places[job_id] for job_id in ("a3", "b2")] == [1, 2]
    everything = [own, *(get_job(database, job.id) for job in list_jobs(database)[0])]
    at_once = find_places(database, everything)
    assert set(at_once) == {"gpu", "cpu", *places}, "its own worker's job is in no queue"
    assert [at_once.get(job.id) for job in everything] == [find_place(database, job) for job in everything]
    claimed = []
    while (claim := queue.claim(make_worker("w"), among=priorities)) is not None:
        claimed.append(claim.job.id)
        assert find_place(database, claim.job) is None, "it runs"
        assert find_place(database, queued[claim.job.id]) is None, "it was taken meanwhile"
    assert claimed == sorted(places, key=lambda job_id: places[job_id])


def test_a_place_says_until_when_its_workers_are_busy(database: Database, queue: Queue) -> None:
    for seconds in (300, 100, 10):
        queue.enqueue(make_request(budget={"max_seconds": seconds}), priority=seconds)
    job, _ = queue.enqueue(make_request(device_kind="cpu"), priority=-1)

    def busy_until() -> object:
        place = find_place(database, job)
        assert place is not None
        return place.busy_until

    assert busy_until() is None
    for name in ("long", "short"):
        add_worker(database, name)
        claim_one(queue, name)
    short = next(job.started_at for job in list_jobs(database)[0] if job.priority == 100)
    assert short is not None
    assert busy_until() == short + timedelta(seconds=100)
    add_worker(database, "idle")
    assert busy_until() is None, "it is free now"
    claim_one(queue, "idle")
    with database.begin() as connection:
        overdue = sa.update(jobs).where(jobs.c.worker == "idle")
        connection.execute(overdue.values(started_at=database.clock(timedelta(minutes=-1))))
    assert busy_until() == short + timedelta(seconds=100), "nobody knows how much longer that one takes"


def test_a_place_is_read_by_one_query_from_an_index_of_the_queued_jobs(database: Database, job: Job) -> None:
    statements: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        statements.append((statement, parameters))

    sa.event.listen(database.engine, "before_cursor_execute", note)
    assert find_place(database, job) == QueuePlace(1, 1, None, "none is running")
    sa.event.remove(database.engine, "before_cursor_execute", note)
    (place,) = [taken for taken in statements if "count(*)" in taken[0]]
    if not database.is_postgresql:  # which takes other plans for small tables
        with database.read() as connection:
            plan = [step.detail for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {place[0]}", place[1])]
        assert sum("COVERING INDEX ix_bexp_jobs_queued" in step for step in plan) == 1
        assert not any("SCAN bexp_jobs" in step for step in plan), plan
