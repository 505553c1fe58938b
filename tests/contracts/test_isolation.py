"""What is done to one job, owner, worker or token, and what is read of it, leaves those before and after it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.storage.audit import read_audit
from bexp.storage.database import Database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobFilter, JobNotFoundError, JobState, get_job, get_summary, list_jobs
from bexp.storage.leaders import give_up_role, hold_role
from bexp.storage.leases import Claim
from bexp.storage.owners import USUAL_SCOPES, Caller
from bexp.storage.pruning import delete_job, prune
from bexp.storage.queue import Queue
from bexp.storage.queue_settings import QueueSettings
from bexp.storage.quotas import Quota, list_quotas, set_quota, sum_stored_bytes
from bexp.storage.run_reports import insert_run_report, read_run_reports
from bexp.storage.tables import metadata
from bexp.storage.tokens import create_token, list_tokens, revoke_token, verify_token
from bexp.storage.trials import read_all_trials, read_trials
from bexp.storage.waiting import note_reason
from bexp.storage.workers import forget_worker, read_workers, register_worker
from tests.contracts.jobs import ANSWER, claim_one
from tests.contracts.samples import make_progress, make_report, make_request, make_worker
from tests.contracts.test_run_reports import make as make_run_report

NAMES = "amz"
HERE = "m" * 16
CHANGES = {"record", "release", "fault", "fail", "resume", "wait", "cancel", "resume again", "finish"}
"""What is done to a job that a client sees: its ETag is another one then."""


@dataclass(frozen=True)
class Three:
    """Three jobs of three owners, each run by a worker; the tests act on the one in the middle."""

    database: Database
    queue: Queue
    claims: dict[str, Claim]
    m: Caller

    def rows(self) -> list[str]:
        """All that is stored of others than the one in the middle."""
        with self.database.read() as connection:
            rows = [row for table in metadata.sorted_tables for row in connection.execute(sa.select(table))]
        return sorted(repr(row) for row in rows if HERE not in row and "m" not in row)


@pytest.fixture
def three(database: Database) -> Three:
    queue, claims = Queue(database, QueueSettings(retry_pause=timedelta(0))), dict[str, Claim]()
    for number, name in enumerate(NAMES):
        caller = Caller(name, USUAL_SCOPES)
        request = make_request(fresh=True, labels={"of": name, name: "x"})
        queue.enqueue(request, by=caller, job_id=name * 16, idempotency_key="same")
        register_worker(database, make_worker(name))
        claim = claims[name * 16] = claim_one(queue, name)
        queue.pin(claim.lease, make_report())
        for step in range(2 + number):
            queue.record(claim.lease, make_progress(step))
            insert_run_report(database, claim.job.id, make_run_report(steps=1 + step))
        create_token(database, name, owner=name)
        set_quota(database, name, Quota(max_queued=number), by=caller)
        hold_role(database, name, name, timedelta(hours=1))
    return Three(database, queue, claims, Caller("m", USUAL_SCOPES))


def test_what_is_done_to_one_leaves_the_others_alone(three: Three) -> None:
    database, queue, m = three.database, three.queue, three.m
    before, lease = three.rows(), three.claims[HERE].lease
    acts: dict[str, Callable[[], object]] = {
        "heartbeat": lambda: queue.heartbeat(lease),
        "record": lambda: queue.record(lease, make_progress(3)),
        "report": lambda: insert_run_report(database, HERE, make_run_report()),
        "release": lambda: queue.release(lease, trouble="the disk is full"),
        "fault": lambda: queue.report_fault(claim_one(queue, "m").lease, "internal error"),
        "fail": lambda: queue.finish(claim_one(queue, "m").lease, JobState.FAILED, error="oh"),
        "resume": lambda: queue.resume(HERE, by=m),
        "wait": lambda: note_reason(database, HERE, "none is running"),
        "cancel": lambda: queue.request_cancel(HERE, by=m),
        "resume again": lambda: queue.resume(HERE, by=m),
        "finish": lambda: queue.finish(claim_one(queue, "m").lease, JobState.SUCCEEDED, answer=ANSWER),
        "delete": lambda: delete_job(database, HERE, by=m),
        "prune": lambda: prune(database, [HERE]),
        "quota": lambda: set_quota(database, "m", Quota(max_queued=7), by=m),
        "no quota": lambda: set_quota(database, "m", None, by=m),
        "revoke": lambda: revoke_token(database, "m", by=m),
    }
    known = get_summary(database, HERE).version
    for name, act in acts.items():
        act()
        assert three.rows() == before, name
        if name in CHANGES:
            assert known < (known := get_summary(database, HERE).version), f"who knows the job is not told: {name}"


def test_what_is_read_of_one_holds_nothing_of_the_others(three: Three) -> None:
    database = three.database
    assert [event.data["number"] for event in read_events(database, HERE) if event.code == 201] == [0, 1, 2]
    assert [event.seq for event in read_events(database, HERE, after=3)] == [4, 5]
    assert len(read_trials(database, HERE)) == len(read_all_trials(database, HERE)) == 3
    assert [one.seq for one in read_trials(database, HERE, after=0, limit=1)] == [1]
    assert [one.report.steps for one in read_run_reports(database, HERE)] == [1, 2, 3]
    assert (get_job(database, HERE).labels, get_summary(database, HERE).last_seq) == ({"of": "m", "m": "x"}, 5)
    for owner in "az":
        with pytest.raises(JobNotFoundError):
            get_job(database, HERE, owner=owner)
    for wanted in (JobFilter(owner="m"), JobFilter(labels=(("of", "m"),)), JobFilter(labels=(("m", "x"),))):
        assert [job.id for job in list_jobs(database, wanted=wanted)[0]] == [HERE]
    assert {record.owner for record in read_audit(database, owner="m")} == {"m"}
    with database.begin() as connection:
        each = [sum_stored_bytes(database, connection, owner, 1 << 60)[0] for owner in NAMES]
    assert each[0] < each[1] < each[2] < 2 * each[0], "they differ by a trial each"
    assert {name: quota.max_queued for name, quota in list_quotas(database).items()} == {"a": 0, "m": 1, "z": 2}


def test_a_worker_a_role_and_a_token_end_alone(three: Three) -> None:
    database = three.database
    secrets = {name: create_token(database, f"{name}2", owner=name) for name in NAMES}
    revoke_token(database, "m2")
    assert [name for name, secret in secrets.items() if verify_token(database, secret)] == ["a", "z"]
    assert {token.name for token in list_tokens(database)} == {"a", "a2", "m", "z", "z2"}
    forget_worker(database, "m")
    assert [known.info.id for known in read_workers(database)] == ["a", "z"]
    register_worker(database, make_worker("a", devices="cuda:1"))
    assert [(known.info.id, known.info.devices) for known in read_workers(database)] == [("a", "cuda:1"), ("z", "")]
    give_up_role(database, "m", "m")
    give_up_role(database, "a", "m")
    taken = [hold_role(database, name, "another", timedelta(hours=1)) for name in NAMES]
    assert taken == [False, True, False]
