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

MAX_CONNECTIONS = 10
"""The most connections of a process, unless it opens the database with another number."""

CONNECT_TIMEOUT = timedelta(seconds=4)
STATEMENT_TIMEOUT = timedelta(seconds=4)
LOCK_TIMEOUT = timedelta(seconds=3)
POOL_TIMEOUT = timedelta(seconds=4)
SQLITE_BUSY_TIMEOUT = timedelta(seconds=4)
IDLE_TRANSACTION_TIMEOUT = timedelta(seconds=5)
"""After this time PostgreSQL ends the transaction of a process that is frozen, and frees its locks."""

DATABASE_TROUBLE = (
    sa.exc.OperationalError,
    sa.exc.InterfaceError,
    sa.exc.InternalError,
    sa.exc.TimeoutError,
)
"""The database cannot be reached, is too busy, or has no room; the same step may be tried again."""

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


def open_database(url: str, *, max_connections: int = MAX_CONNECTIONS) -> Database:
    """Open a database; nothing is created but the folder of a SQLite file.

    Args:
        url: `sqlite:///path`, or `postgresql://user:password@host/name`.
        max_connections: that the process may hold at once; whoever asks for more waits up to POOL_TIMEOUT.

    Raises:
        ValueError: the URL is malformed or names another kind of database.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ValueError("the database URL is malformed; use sqlite:///PATH or postgresql://...") from error
    if parsed.drivername in {"postgresql", "postgres", "postgresql+psycopg"}:
        return _open_postgresql(parsed.set(drivername="postgresql+psycopg"), max_connections)
    if parsed.drivername in {"sqlite", "sqlite+pysqlite"}:
        return _open_sqlite(parsed, max_connections)
    raise ValueError(f"database '{parsed.drivername}' is not supported; use sqlite:///PATH or postgresql://...")


_dump_json = partial(json.dumps, allow_nan=False, separators=(",", ":"))


def postgresql_options() -> dict[str, str | int]:
    """Return the connection parameters that bound how long a process waits for PostgreSQL, or keeps it waiting."""
    timeouts = {
        "statement_timeout": STATEMENT_TIMEOUT,
        "lock_timeout": LOCK_TIMEOUT,
        "idle_in_transaction_session_timeout": IDLE_TRANSACTION_TIMEOUT,
    }
    options = " ".join(f"-c {name}={_milliseconds(value)}" for name, value in timeouts.items())
    # The kernel gives up on a server that has vanished: what was sent is not confirmed, or an idle peer is silent.
    kernel: dict[str, str | int] = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 2}
    kernel["tcp_user_timeout"] = _milliseconds(CONNECT_TIMEOUT)
    return {"connect_timeout": int(CONNECT_TIMEOUT.total_seconds()), "options": options, **kernel}


def _milliseconds(duration: timedelta) -> int:
    return int(duration.total_seconds() * 1000)


def _open_postgresql(url: sa.URL, max_connections: int) -> Database:
    given = {name: value for name, value in postgresql_options().items() if name not in url.query}
    engine = sa.create_engine(
        url,
        pool_pre_ping=True,
        pool_size=min(2, max_connections),
        max_overflow=max_connections - min(2, max_connections),
        pool_timeout=POOL_TIMEOUT.total_seconds(),
        json_serializer=_dump_json,
        connect_args=given,
    )
    return Database(engine)


def _open_sqlite(url: sa.URL, max_connections: int) -> Database:
    if not url.database or url.database == ":memory:" or "mode=memory" in url.database:
        raise ValueError("the SQLite database must be a file, since several processes share it: sqlite:///PATH")
    path = Path(url.database).expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(
        url.set(database=str(path)),
        pool_size=min(2, max_connections),
        max_overflow=max_connections - min(2, max_connections),
        pool_timeout=POOL_TIMEOUT.total_seconds(),
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
