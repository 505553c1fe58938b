"""Behind a pooler that shares connections by transaction, everything works but notifications, and that is noticed."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from bexp.storage import notifications
from bexp.storage.database import DATABASE_TROUBLE, Database, DatabaseLimits, open_database
from bexp.storage.events import read_events
from bexp.storage.jobs import JobState, get_job
from bexp.storage.leaders import HOUSEKEEPER, hold_role
from bexp.storage.notifications import QUEUED_JOBS, Listener
from bexp.storage.pruning import drop_finished_studies, prune
from bexp.storage.queue import Queue
from bexp.storage.quotas import EVERYBODY, Quota, set_quota
from bexp.storage.schema import exclusive, is_current, upgrade
from bexp.storage.studies import write_studies
from bexp.storage.tokens import create_token, list_tokens, verify_token
from bexp.storage.workers import read_workers, register_worker
from tests.contracts.jobs import ANSWER, claim_one, stored_trials
from tests.contracts.samples import make_progress, make_report, make_request, make_trial, make_worker
from tests.contracts.transaction_pooler import pooled
from tests.waits import PATIENCE_SECONDS

REPEATS = 7
"""The driver would prepare a statement for its sixth execution."""


@pytest.fixture
def pooled_url(postgresql_url: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, pooled(postgresql_url, Path(folder)) as url:
        yield url


@pytest.fixture
def behind(open_url: Callable[[str], Database], pooled_url: str) -> Database:
    """A database behind the pooler."""
    return open_url(pooled_url)


def test_the_pooler_of_this_test_gives_each_transaction_another_connection(behind: Database) -> None:
    with behind.engine.connect() as connection:
        last: set[int] = set()
        for _ in range(4):
            with connection.begin():
                pids = {connection.scalar(sa.text("SELECT pg_backend_pid()")) for _ in range(2)}
            assert len(pids) == 1
            assert pids != last
            last = pids


def test_jobs_run_to_their_end(behind: Database) -> None:
    queue = Queue(behind)
    set_quota(behind, EVERYBODY, Quota(max_queued=100, max_running=100))
    register_worker(behind, make_worker())
    for _ in range(REPEATS):
        job, _ = queue.enqueue(make_request(fresh=True))
        claim = claim_one(queue)
        assert claim.job.id == job.id
        queue.pin(claim.lease, make_report())
        seq = queue.record(claim.lease, make_progress(0))
        assert queue.record(claim.lease, make_progress(1), after_seq=seq) == seq + 1
        assert not queue.heartbeat(claim.lease).cancel_requested
        register_worker(behind, make_worker())
        assert hold_role(behind, HOUSEKEEPER, "me", timedelta(seconds=10))
        queue.note_waiting()
        queue.finish(claim.lease, JobState.SUCCEEDED, answer=ANSWER)
        assert get_job(behind, job.id).state is JobState.SUCCEEDED
        assert stored_trials(behind, job.id) == [make_trial(0), make_trial(1)]
        assert len(read_events(behind, job.id)) == 5
    assert [worker.info.id for worker in read_workers(behind)] == ["a"]


def test_tokens_studies_and_retention(behind: Database) -> None:
    queue = Queue(behind)
    for number in range(REPEATS):
        secret = create_token(behind, f"token-{number}")
        assert verify_token(behind, secret) is not None
    assert len(list_tokens(behind)) == REPEATS
    queue.enqueue(make_request())
    claim = claim_one(queue)
    queue.record(claim.lease, make_progress(0))
    assert write_studies(behind, claim.job.id).names == (claim.job.id,)
    queue.finish(claim.lease, JobState.SUCCEEDED, answer=ANSWER)
    assert drop_finished_studies(behind) == 1
    prune(behind, [claim.job.id])
    assert read_events(behind, claim.job.id) == []


def test_a_schema_is_made_once_by_several(postgresql_server: str, open_url: Callable[[str], Database]) -> None:
    name = "bexp_behind_a_pooler"
    server = open_url(postgresql_server)
    alone = server.engine.execution_options(isolation_level="AUTOCOMMIT")
    with alone.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE template1")
    direct = sa.make_url(postgresql_server).set(database=name).render_as_string(hide_password=False)
    try:
        with tempfile.TemporaryDirectory() as folder, pooled(direct, Path(folder), num_servers=6) as url:
            databases = [open_url(url) for _ in range(3)]
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(upgrade, databases))
            assert is_current(databases[0])
    finally:
        with alone.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


def test_one_at_a_time_changes_tables(behind: Database) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def change(_: int) -> None:
        nonlocal inside, most
        with exclusive(behind):
            with guard:
                inside += 1
                most = max(most, inside)
            is_current(behind)
            with guard:
                inside -= 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(change, range(10)))
    assert most == 1
    with behind.read() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")) == 0


def test_limits_hold_for_who_set_them(behind: Database) -> None:
    limited = open_database(behind.url, DatabaseLimits(statement=timedelta(seconds=0.5), max_connections=1))
    for _ in range(3):
        is_current(limited)
        with limited.begin() as connection, pytest.raises(DATABASE_TROUBLE, match="statement timeout"):
            connection.execute(sa.text("SELECT pg_sleep(600)"))
        with behind.begin() as connection:
            connection.execute(sa.text("SELECT pg_sleep(0.6)"))
    limited.dispose()


def test_a_listener_notices_that_it_hears_nothing(behind: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = threading.Event()
    monkeypatch.setattr(notifications, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(notifications.logger, "info", lambda *_: probed.set())
    listener = Listener(behind, QUEUED_JOBS, lambda _: None)
    listener.start()
    assert probed.wait(PATIENCE_SECONDS)
    assert not listener.is_listening
    listener.close()
