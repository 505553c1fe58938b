from __future__ import annotations

from datetime import timedelta

from bexp.explorer.records.event import Progress
from bexp.explorer.records.measurement import Outcome
from bexp.storage.database import Database
from bexp.storage.jobs import JobState
from bexp.storage.queue import Queue
from bexp.storage.quotas import EVERYBODY, Quota, set_quota
from bexp.storage.statistics import read_statistics
from bexp.storage.workers import register_worker
from tests.contracts.samples import make_request, make_trial, make_worker


def test_an_empty_database_counts_zero(database: Database) -> None:
    statistics = read_statistics(database)
    assert set(statistics.jobs_by_state) == set(JobState)
    assert not any(statistics.jobs_by_state.values())
    assert statistics.oldest_queued_seconds == 0
    assert statistics.workers_by_device_kind == {}


def test_counts(database: Database) -> None:
    queue = Queue(database)
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


def test_what_a_quota_holds_back_is_no_lack_of_workers(database: Database) -> None:
    queue = Queue(database)
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
