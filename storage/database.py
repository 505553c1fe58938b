"""The connection to a database: SQLite by default, PostgreSQL by URL."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event

from storage.tables import UTCDateTime

SQLITE_BUSY_TIMEOUT = timedelta(seconds=30)
SQLITE_WAL_IS_SAFE = sqlite3.sqlite_version_info >= (3, 51, 3)
"""Earlier versions can corrupt a database when a write-ahead log is reset: https://sqlite.org/wal.html#walresetbug."""

_READ_ONLY = "bexp_read_only"


class Database:
    """An engine, and the clock that leases are measured by."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self._reader = engine.execution_options(**{_READ_ONLY: True})

    @property
    def url(self) -> str:
        """The URL with the driver and the password; not for display."""
        return self.engine.url.render_as_string(hide_password=False)

    @property
    def is_postgresql(self) -> bool:
        """Whether several hosts can share it."""
        return self.engine.dialect.name == "postgresql"

    @property
    def sqlite_path(self) -> Path | None:
        """The file of a SQLite database; null for PostgreSQL."""
        return None if self.is_postgresql else Path(self.engine.url.database or "")

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Open a transaction that may write; on SQLite it holds the write lock from its start."""
        with self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads; on SQLite it does not wait for writers that have not committed yet."""
        with self._reader.connect() as connection, connection.begin():
            yield connection

    def now(self, connection: sa.Connection) -> datetime:
        """Return the database's time in UTC: the server's on PostgreSQL, the host's on SQLite."""
        if not self.is_postgresql:
            return datetime.now(UTC)
        now: datetime = connection.execute(sa.select(self.clock())).scalar_one()
        return now

    def clock(self, offset: timedelta = timedelta(0)) -> sa.ColumnElement[datetime]:
        """Return `now` + `offset` as an expression, so that one statement can both read the clock and store it."""
        if self.is_postgresql:
            now = sa.func.clock_timestamp(type_=UTCDateTime())
            return sa.type_coerce(now + sa.literal(offset, sa.Interval()), UTCDateTime())
        return sa.literal(datetime.now(UTC) + offset, UTCDateTime())

    def ping(self) -> None:
        """Raise sqlalchemy.exc.SQLAlchemyError if the database cannot be reached."""
        with self.read() as connection:
            connection.execute(sa.select(1))

    def dispose(self) -> None:
        """Close the connections."""
        self.engine.dispose()


def open_database(url: str) -> Database:
    """Open a database; nothing is created but the folder of a SQLite file.

    Args:
        url: `sqlite:///path`, or `postgresql://user:password@host/name`.

    Raises:
        ValueError: the URL is malformed or names another kind of database.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ValueError("the database URL is malformed; use sqlite:///PATH or postgresql://...") from error
    if parsed.drivername in {"postgresql", "postgres", "postgresql+psycopg"}:
        return _open_postgresql(parsed.set(drivername="postgresql+psycopg"))
    if parsed.drivername in {"sqlite", "sqlite+pysqlite"}:
        return _open_sqlite(parsed)
    raise ValueError(f"database '{parsed.drivername}' is not supported; use sqlite:///PATH or postgresql://...")


_dump_json = partial(json.dumps, allow_nan=False, separators=(",", ":"))


def _open_postgresql(url: sa.URL) -> Database:
    engine = sa.create_engine(url, pool_pre_ping=True, pool_size=5, max_overflow=20, json_serializer=_dump_json)
    return Database(engine)


def _open_sqlite(url: sa.URL) -> Database:
    if not url.database or url.database == ":memory:" or "mode=memory" in url.database:
        raise ValueError("the SQLite database must be a file, since several processes share it: sqlite:///PATH")
    path = Path(url.database).expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(
        url.set(database=str(path)),
        pool_size=5,
        max_overflow=20,
        json_serializer=_dump_json,
        connect_args={"timeout": SQLITE_BUSY_TIMEOUT.total_seconds()},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: object) -> None:
        # The driver's own transaction handling neither begins before reads nor takes the write lock early.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return Database(engine)
