from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bexp.storage.database import SQLITE_WAL_IS_SAFE, Database, DatabaseLimits, open_database


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgres"])
def test_postgresql_urls_get_the_driver(scheme: str) -> None:
    database = open_database(f"{scheme}://me:se%7Bcret@host:5433/name")
    assert database.url == "postgresql+psycopg://me:se%7Bcret@host:5433/name"
    assert database.is_postgresql


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://host/name", "sqlite://", "sqlite:///:memory:", "postgresql+asyncpg://host/name"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="sqlite:///PATH"):
        open_database(url)


def test_a_password_is_not_in_an_error() -> None:
    with pytest.raises(ValueError, match="database") as caught:
        open_database("mysql://me:secret@host/name")
    assert "secret" not in str(caught.value)


def test_the_folder_of_a_file_is_created(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/a/b/bexp.db")
    database.ping()
    assert (tmp_path / "a" / "b" / "bexp.db").exists()
    assert database.sqlite_path == tmp_path / "a" / "b" / "bexp.db"
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
    kept = {"prepare_threshold": None, "keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 2}
    kept["tcp_user_timeout"] = 4000
    assert given == [{**kept, "connect_timeout": 3}, kept]
