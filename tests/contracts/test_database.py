from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.storage.database import DATABASE_TROUBLE, Database, DatabaseLimits, open_database
from bexp.storage.queue import Queue
from bexp.storage.quotas import EVERYBODY, Quota, set_quota
from bexp.storage.tables import jobs
from tests.contracts.samples import make_request


def test_the_clock_is_utc_and_near_ours(database: Database) -> None:
    with database.read() as connection:
        now = database.now(connection)
        later = connection.execute(sa.select(database.clock(timedelta(hours=1)))).scalar_one()
    assert now.tzinfo is UTC
    assert abs(now - datetime.now(UTC)) < timedelta(seconds=5)
    assert timedelta(minutes=59) < later - now < timedelta(minutes=61)


def test_an_error_does_not_repeat_what_was_to_be_stored(database: Database) -> None:
    """Errors go to logs; what is stored may be the digest of a token, or what somebody explores."""
    with pytest.raises(sa.exc.DBAPIError) as caught, database.begin() as connection:
        connection.execute(sa.text("INSERT INTO no_such_table VALUES (:value)"), {"value": "a private matter"})
    assert "private" not in str(caught.value)


def test_a_transaction_that_fails_leaves_nothing(database: Database) -> None:
    with pytest.raises(ZeroDivisionError), database.begin() as connection:
        connection.exec_driver_sql("DELETE FROM bexp_schema_version")
        _ = 1 / 0
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM bexp_schema_version").scalar_one() == 1


def test_threads_write_to_sqlite_in_turns_and_wait_without_a_connection(database: Database) -> None:
    if database.is_postgresql:
        pytest.skip("PostgreSQL has no lock for all that write")
    limits = DatabaseLimits(turn=timedelta(seconds=0.05), max_connections=1)
    limited = open_database(database.url, limits)
    with limited.begin(), pytest.raises(sa.exc.TimeoutError, match=r"no turn to write within 0\.05 s"), limited.begin():
        pass
    with limited.begin() as connection:
        connection.execute(sa.select(jobs))
    limited.dispose()


def test_a_submission_takes_few_statements(database: Database) -> None:
    set_quota(database, EVERYBODY, Quota(max_queued=9))
    request = make_request(fresh=True)
    statements: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        statements.append((statement, parameters))

    sa.event.listen(database.engine, "before_cursor_execute", note)
    Queue(database).enqueue(request)
    sa.event.remove(database.engine, "before_cursor_execute", note)
    assert len(statements) == 7
    if not database.is_postgresql:  # which takes other plans for small tables
        for words, index in (("SELECT count(*)", "queued"), ("sum(bexp_jobs.stored_bytes)", "owner_stored_bytes")):
            (counts,) = [taken for taken in statements if words in taken[0]]
            with database.read() as connection:
                (step,) = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {counts[0]}", counts[1]).all()
            assert f"COVERING INDEX ix_bexp_jobs_{index}" in step.detail


def test_nan_is_refused_alike(database: Database) -> None:
    values = {"id": "x", "state": "queued", "devices_needed": 1, "attempt": 0, "num_releases": 0, "last_seq": 0}
    now = datetime.now(UTC)
    row = {**values, "version": 0, "cancel_requested": False, "created_at": now, "queued_at": now}
    document = make_request().model_dump(mode="json") | {"tolerance": float("nan")}
    with pytest.raises((sa.exc.StatementError, ValueError), match="JSON compliant"), database.begin() as connection:
        connection.execute(sa.insert(jobs).values(**row, request=document))


def test_a_process_that_is_frozen_within_a_transaction_keeps_no_lock_of_postgresql(database: Database) -> None:
    if not database.is_postgresql:
        pytest.skip("SQLite's lock is the file's, which the kernel frees when the process ends")
    limited = open_database(database.url, DatabaseLimits(idle_transaction=timedelta(seconds=0.3)))
    change = "UPDATE bexp_schema_version SET version_num = version_num"
    with pytest.raises(DATABASE_TROUBLE), limited.begin() as frozen:
        frozen.exec_driver_sql(change)
        with database.begin() as other:
            other.exec_driver_sql("SET LOCAL lock_timeout = '60s'")
            other.exec_driver_sql(change)
        frozen.exec_driver_sql(change)
    limited.dispose()


def test_a_commit_is_as_durable_as_the_server_is_told(database: Database) -> None:
    """No connection asks for less, as `synchronous_commit = off` would."""
    limited = open_database(database.url, DatabaseLimits())
    with limited.read() as connection:
        if database.is_postgresql:
            query = "SELECT source FROM pg_settings WHERE name = 'synchronous_commit'"
            assert connection.exec_driver_sql(query).scalar_one() in {"default", "configuration file"}
        else:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() >= 1
    limited.dispose()


def test_a_connection_in_use_is_closed_after_the_others(database: Database) -> None:
    own = open_database(database.url)
    with own.read() as connection:
        driver: Any = connection.connection.driver_connection
        own.dispose()
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
    with pytest.raises(database.engine.dialect.loaded_dbapi.Error):
        driver.execute("SELECT 1")
    with own.read() as connection, own.read() as other:
        assert [each.exec_driver_sql("SELECT 1").scalar_one() for each in (connection, other)] == [1, 1]
    with own.read() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
    own.dispose()


@pytest.mark.parametrize("password", ["x@secret", "x@sec/ret", "x@/secret", "x@1:secret"])
def test_a_password_with_an_at_sign_is_not_shown_as_a_host(password: str) -> None:
    with pytest.raises(ValueError, match="the database URL") as caught:
        open_database(f"postgresql://bexp:{password}@localhost/bexp")
    assert "sec" not in str(caught.value)
