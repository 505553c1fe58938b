from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.explorer.records.event import Progress
from bexp.explorer.records.measurement import Outcome
from bexp.storage import statistics as storage_statistics
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.owners import USUAL_SCOPES, Caller
from bexp.storage.queue import Queue
from bexp.storage.quotas import EVERYBODY, Quota, set_quota
from bexp.storage.statistics import read_statistics
from bexp.storage.tables import workers
from bexp.storage.workers import register_worker
from tests.contracts.jobs import store
from tests.contracts.samples import make_request, make_trial, make_worker


def test_counts(database: Database, queue: Queue) -> None:
    for _ in range(3):
        queue.enqueue(make_request())
    claim = queue.claim(make_worker())
    assert claim is not None
    queue.record(claim.lease, Progress(trial=make_trial(0)))
    queue.record(claim.lease, Progress(trial=make_trial(1, Outcome.OUT_OF_MEMORY)))
    queue.record(claim.lease, Progress(trial=make_trial(2)))
    for worker_id, kind in (("a", "cuda"), ("b", "cuda"), ("c", "cpu")):
        register_worker(database, make_worker(worker_id, device_kind=kind, targets={"bexp": worker_id}))
    statistics = read_statistics(database)
    assert statistics.jobs_by_state[JobState.QUEUED] == 2
    assert statistics.jobs_by_state[JobState.RUNNING] == 1
    assert statistics.oldest_queued_seconds > 0
    assert statistics.workers_by_device_kind == {"cuda": 2, "cpu": 1}
    assert statistics.workers_by_target == {("bexp", "a"): 1, ("bexp", "b"): 1, ("bexp", "c"): 1}
    assert statistics.trials_by_outcome[Outcome.OK] == 2
    assert statistics.trials_by_outcome[Outcome.OUT_OF_MEMORY] == 1
    assert statistics.trials_by_outcome[Outcome.CRASHED] == 0


def test_what_a_quota_holds_back_is_no_lack_of_workers(database: Database, queue: Queue) -> None:
    for _ in range(2):
        queue.enqueue(make_request())
    set_quota(database, EVERYBODY, Quota(max_running=1))
    assert queue.claim(make_worker()) is not None
    register_worker(database, make_worker())
    queue.note_waiting(grace=timedelta(0))
    statistics = read_statistics(database)
    assert statistics.jobs_by_state[JobState.QUEUED] == statistics.num_held_back == 1
    assert statistics.num_without_worker == 0
    assert statistics.oldest_queued_seconds == 0
    queue.enqueue(make_request(device_kind="cuda"), by=Caller("b", USUAL_SCOPES), job_id="gpu")
    queue.note_waiting(grace=timedelta(0))
    ended, _ = queue.enqueue(make_request(device_kind="cuda"), by=Caller("b", USUAL_SCOPES))
    store(database, ended.id, state="failed", waiting_reason="none is running")
    with database.read() as connection:
        now = database.now(connection)
    for ago, shown in ((60, 60), (-60, 0)):  # the clock may have been set back
        store(database, "gpu", queued_at=now - timedelta(seconds=ago))
        statistics = read_statistics(database)
        assert (statistics.num_held_back, statistics.num_without_worker) == (1, 1)
        assert shown <= statistics.oldest_queued_seconds < shown + (30 if shown else 1e-9)


def test_workers_are_live_for_15_seconds_and_lost_for_a_day(database: Database) -> None:
    silent_seconds = {"a": 0, "b": 14.5, "c": 15.5, "d": 86_390, "e": 86_410}
    for worker_id in silent_seconds:
        register_worker(database, make_worker(worker_id))
    with database.begin() as connection:
        for worker_id, seconds in silent_seconds.items():
            here = sa.update(workers).where(workers.c.id == worker_id)
            connection.execute(here.values(last_seen_at=database.clock(timedelta(seconds=-seconds))))
    statistics = read_statistics(database)
    assert (statistics.workers_by_device_kind, statistics.num_lost_workers) == ({"cpu": 2}, 2)
    assert read_statistics(database, live_within=timedelta(seconds=5)).num_lost_workers == 3


def test_recent_answers_are_those_that_were_measured_within_the_last_hour(
    database: Database, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.read() as connection:
        now = database.now(connection)
    day = 86_400
    for took, ago, values in (
        (90, 0, {}),
        (30, 3590, {}),
        (60, 0, {}),
        (day - 10, 0, {}),
        (day + 10, 0, {}),
        (10, 3610, {}),
        (20, 0, {"state": "failed"}),
        (0, 0, {"reused_from": "m" * 16}),
    ):
        job, _ = queue.enqueue(make_request(fresh=True))
        finished_at = now - timedelta(seconds=ago)
        times = {"created_at": finished_at - timedelta(seconds=took), "finished_at": finished_at}
        store(database, job.id, **({"state": "succeeded"} | times | values))
    statistics = read_statistics(database)
    assert statistics.recent_answer_seconds == pytest.approx([30, 60, 90, day - 10])
    monkeypatch.setattr(storage_statistics, "MOST_RECENT", 2)
    assert read_statistics(database).recent_answer_seconds == pytest.approx([60, 90]), "of those that came last"
    assert (statistics.num_reused, statistics.oldest_queued_seconds) == (1, 0)
