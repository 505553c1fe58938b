from __future__ import annotations

import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.storage.database import (
    SQLITE_WAL_IS_SAFE,
    Database,
    DatabaseLimits,
    WriterTurns,
    describe_trouble,
    open_database,
)
from tests.waits import PATIENCE_SECONDS


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgres"])
def test_postgresql_urls_get_the_driver(scheme: str) -> None:
    database = open_database(f"{scheme}://me:se%7Bcret@host:5433/name")
    assert database.url == "postgresql+psycopg://me:se%7Bcret@host:5433/name"
    assert database.is_postgresql


def test_an_old_sqlite_is_refused_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ValueError, match=r"SQLite 3\.35 or later"):
        open_database(f"sqlite:///{tmp_path}/bexp.db")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "mysql://host/name",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory&uri=true",
        "postgresql+asyncpg://host/name",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="sqlite:///PATH"):
        open_database(url)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (sa.exc.OperationalError("SELECT", {}, ConnectionError("\n refused \nIs it running?")), "refused"),
        (sa.exc.OperationalError("SELECT", {}, ConnectionError()), "ConnectionError"),
        (sa.exc.TimeoutError("no connection\nwithin 3 s"), "no connection"),
    ],
)
def test_trouble_is_told_as_the_driver_names_it_in_a_line(error: sa.exc.SQLAlchemyError, told: str) -> None:
    assert describe_trouble(error) == told


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ValueError, match=r"PostgreSQL needs psycopg, which is missing: pip install 'bexp\[service\]'"):
        open_database("postgresql://host/name")


def test_a_process_opens_no_more_connections_than_its_limit(tmp_path: Path) -> None:
    limits = DatabaseLimits(max_connections=2, pool=timedelta(seconds=0.01))
    database = open_database(f"sqlite:///{tmp_path / 'bexp.db'}", limits)
    with database.read(), database.read(), pytest.raises(sa.exc.TimeoutError, match="QueuePool"), database.read():
        pass
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 3000
    database.dispose()


def test_sqlite_checks_foreign_keys_and_avoids_the_unsafe_journal(sqlite_database: Database) -> None:
    with sqlite_database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
        journal = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
    assert journal == ("wal" if SQLITE_WAL_IS_SAFE else "delete")


def test_writers_that_read_first_wait_for_each_other(sqlite_database: Database) -> None:
    """With a lock taken at the first write only, two of them would deadlock and one would fail at once."""
    with sqlite_database.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE counter (value INTEGER)")
        connection.exec_driver_sql("INSERT INTO counter VALUES (0)")

    def add(_: int) -> None:
        with sqlite_database.begin() as connection:
            value = connection.exec_driver_sql("SELECT value FROM counter").scalar_one()
            connection.execute(sa.text("UPDATE counter SET value = :value").bindparams(value=value + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(20)))
    with sqlite_database.read() as connection:
        assert connection.exec_driver_sql("SELECT value FROM counter").scalar_one() == 20


def test_reads_are_transactions_too(sqlite_database: Database) -> None:
    """So that several statements see one state; the driver by itself would not begin one."""
    with sqlite_database.read() as connection:
        driver = connection.connection.dbapi_connection
        assert isinstance(driver, sqlite3.Connection)
        assert driver.in_transaction


def test_a_reader_does_not_wait_for_a_writer(sqlite_database: Database) -> None:
    with sqlite_database.begin() as writer:
        writer.exec_driver_sql("DELETE FROM bexp_schema_version")
        with sqlite_database.read() as reader:
            assert reader.exec_driver_sql("SELECT count(*) FROM bexp_schema_version").scalar_one() == 1


def test_a_postgresql_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    create = sa.create_engine

    def create_engine(*arguments: Any, **options: Any) -> sa.Engine:
        given.append(options["connect_args"])
        return create(*arguments, **options)

    monkeypatch.setattr(sa, "create_engine", create_engine)
    limits = DatabaseLimits(statement=timedelta(seconds=4), connect=timedelta(seconds=3))
    for query in ("", "?connect_timeout=9"):
        open_database(f"postgresql://host/name{query}", limits).dispose()
    open_database("postgresql://host/name", replace(limits, connect=timedelta(seconds=1))).dispose()
    kept = {"prepare_threshold": None, "keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 2}
    kept["tcp_user_timeout"] = 4000
    shortest = {**kept, "connect_timeout": 2}  # libpq takes no less
    assert given == [{**kept, "connect_timeout": 3}, kept, shortest]


def _start_waiting(turns: WriterTurns, served: list[int], number: int) -> threading.Thread:
    """Start a thread that waits for a turn, and return it once it waits."""

    def wait() -> None:
        assert turns.acquire(PATIENCE_SECONDS)
        served.append(number)
        turns.release()

    before = turns.num_waiting
    thread = threading.Thread(target=wait)
    thread.start()
    while turns.num_waiting == before:
        time.sleep(0.001)
    return thread


def test_threads_get_their_turn_in_the_order_in_which_they_asked() -> None:
    turns = WriterTurns()
    served: list[int] = []
    assert turns.acquire(0)
    threads = [_start_waiting(turns, served, number) for number in range(6)]
    turns.release()
    assert turns.acquire(PATIENCE_SECONDS)  # behind all of them, although this thread has just had a turn
    assert served == list(range(6))
    for thread in threads:
        thread.join()


def test_a_thread_that_waits_for_too_long_leaves_the_queue_to_the_others() -> None:
    turns = WriterTurns()
    served: list[int] = []
    assert turns.acquire(0)
    assert not turns.acquire(0.01)
    thread = _start_waiting(turns, served, 1)
    turns.release()
    thread.join()
    assert served == [1]
    assert turns.num_waiting == 0
    assert turns.acquire(0)
