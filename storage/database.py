"""The connection to a database: SQLite by default, PostgreSQL by URL."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import stat
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite

from bexp.private_files import make_private_folder, private
from bexp.storage.tables import UTCDateTime


class WriterTurns:
    """A lock that goes to its waiters in the order in which they asked for it.

    `threading.Lock` keeps no order. The thread that has just released it may take it again before the others wake up,
    so that one of eight waiters may wait four times as long as most.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def num_waiting(self) -> int:
        """The number of threads that wait for their turn."""
        return len(self._waiting)

    def acquire(self, timeout_seconds: float) -> bool:
        """Wait for a turn; return whether it came in time."""
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return True
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        if mine.acquire(timeout=timeout_seconds):
            return True
        with self._guard:
            if mine in self._waiting:
                self._waiting.remove(mine)
                return False
        return True  # the turn came between the end of the wait and this look

    def release(self) -> None:
        """Hand the turn to whoever has waited longest."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


SQLITE_BUSY_TIMEOUT = timedelta(seconds=30)
SQLITE_VERSION = (3, 35)
"""The first one with RETURNING."""
SQLITE_WAL_IS_SAFE = sqlite3.sqlite_version_info >= (3, 51, 3)
"""Earlier versions can corrupt a database when a write-ahead log is reset: https://sqlite.org/wal.html#walresetbug."""

DATABASE_TROUBLE = (
    sa.exc.OperationalError,
    sa.exc.InterfaceError,
    sa.exc.InternalError,
    sa.exc.TimeoutError,
)
"""The database cannot be reached, is too busy, has no room, or takes no writes; the same step may be tried again."""

UNPREPARED = {"prepare_threshold": None}
"""Arguments of a connection to PostgreSQL. A pooler that shares connections by transaction may know no statement that
the driver has prepared over another one.
"""

_READ_ONLY = "bexp_read_only"
_NOW = sa.select(sa.func.clock_timestamp(type_=UTCDateTime()))

_log = logging.getLogger(__name__)


_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def dump_json(document: object) -> str:
    """Return a document as JSON without the NUL and lone surrogates that PostgreSQL refuses.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    if "\\u0000" in text:  # the search for what is escaped takes longer than all else here
        text = _ESCAPED_NUL.sub(r"\1", text)
    return text.encode("utf-8", "replace").decode()


def describe_trouble(error: sa.exc.SQLAlchemyError) -> str:
    """Return the cause of an error of the database, as the driver names it, in one line."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


@dataclass(frozen=True, slots=True)
class DatabaseLimits:
    """The longest waits of a process for a database, and the most connections that it opens."""

    connect: timedelta = timedelta(seconds=3)
    statement: timedelta = timedelta(seconds=4)
    lock: timedelta = timedelta(seconds=3)
    """The wait for a lock; SQLite has one, that of the file."""
    pool: timedelta = timedelta(seconds=3)
    idle_transaction: timedelta = timedelta(seconds=5)
    """PostgreSQL ends a transaction whose process is silent for so long, as a frozen one is, and frees its locks."""
    turn: timedelta = timedelta(seconds=1.5)
    """The wait of a thread for the other threads of its process that write to SQLite, before that for the lock."""
    max_connections: int = 10


class Database:
    """An engine, and the clock that leases are measured by."""

    def __init__(self, engine: sa.Engine, turn: timedelta = SQLITE_BUSY_TIMEOUT) -> None:
        self.engine = engine
        self._turn_seconds = turn.total_seconds()
        self._turns = WriterTurns()
        self._reader = engine.execution_options(**{_READ_ONLY: True})

    @property
    def url(self) -> str:
        """The URL with the driver and the password; not for display."""
        return self.engine.url.render_as_string(hide_password=False)

    @property
    def is_postgresql(self) -> bool:
        """Whether it is PostgreSQL, which several hosts can share."""
        return self.engine.dialect.name == "postgresql"

    @property
    def sqlite_path(self) -> Path | None:
        """The file of a SQLite database; None for PostgreSQL."""
        return None if self.is_postgresql else Path(self.engine.url.database or "")

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Open a transaction that may write; on SQLite it holds the write lock from its start."""
        with self._take_turn(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        """Let the threads of this process write to SQLite one after the other; a thread that waits has no connection.

        SQLite itself keeps no order: a connection tries a locked file again after up to 100 ms, and some for seconds.

        Raises:
            sqlalchemy.exc.TimeoutError: the others took too long.
        """
        if self.is_postgresql:
            yield
            return
        if not self._turns.acquire(self._turn_seconds):
            raise sa.exc.TimeoutError(f"database is locked: no turn to write within {self._turn_seconds:g} s")
        try:
            yield
        finally:
            self._turns.release()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads; on SQLite it does not wait for writers that have not committed yet."""
        with self._reader.connect() as connection, connection.begin():
            yield connection

    def now(self, connection: sa.Connection) -> datetime:
        """Return the database's time in UTC: the server's on PostgreSQL, the host's on SQLite."""
        if not self.is_postgresql:
            return datetime.now(UTC)
        now: datetime = connection.execute(_NOW).scalar_one()
        return now

    def clock(self, offset: timedelta = timedelta(0)) -> sa.ColumnElement[datetime]:
        """Return `now` + `offset` as an expression, so that one statement can both read the clock and store it."""
        if self.is_postgresql:
            now = sa.func.clock_timestamp(type_=UTCDateTime())
            return sa.type_coerce(now + sa.literal(offset, sa.Interval()), UTCDateTime()) if offset else now
        return sa.literal(datetime.now(UTC) + offset, UTCDateTime())

    def upsert(
        self, table: sa.Table, key: Mapping[str, Any], values: Mapping[str, Any], where: Any = None
    ) -> sa.Insert:
        """Return a statement that inserts a row, or changes the row with this key if it meets `where`."""
        insert = postgresql.insert(table) if self.is_postgresql else sqlite.insert(table)
        return insert.values({**key, **values}).on_conflict_do_update(index_elements=[*key], set_=values, where=where)

    def dispose(self) -> None:
        """Close the connections; those in use are closed when they are given back."""
        pool = self.engine.pool
        self.engine.dispose()
        event.listen(pool, "checkin", _close_late)  # not of the pool that takes its place


def _close_late(connection: Any, _: object) -> None:
    if connection is not None:
        connection.close()


def open_database(url: str, limits: DatabaseLimits | None = None) -> Database:
    """Open a database; only the folder of a SQLite file is created.

    That folder is for this user alone, and so is the file, which the first connection creates.

    Args:
        url: `sqlite:///path`, or `postgresql://user:password@host/name`.
        limits: on waiting and on connections; None for those of the drivers.

    Raises:
        ValueError: the URL is malformed, or names another kind of database, or one whose driver is missing.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ValueError("the database URL is malformed; use sqlite:///PATH or postgresql://...") from error
    if not parsed.drivername.startswith("sqlite") and "@" in f"{parsed.host}{parsed.database}":
        # SQLAlchemy ends the password at the first @, so what follows would be shown as the name of a host
        raise ValueError("the database URL cannot be read; write an @ of the password as %40, and a / as %2F")
    if parsed.drivername in {"postgresql", "postgres", "postgresql+psycopg"}:
        try:
            return _open_postgresql(parsed.set(drivername="postgresql+psycopg"), limits)
        except ModuleNotFoundError as error:
            raise ValueError(f"PostgreSQL needs {error.name}, which is missing: pip install 'bexp[service]'") from error
    if parsed.drivername in {"sqlite", "sqlite+pysqlite"}:
        return _open_sqlite(parsed, limits)
    raise ValueError(f"database '{parsed.drivername}' is not supported; use sqlite:///PATH or postgresql://...")


def _pool_options(limits: DatabaseLimits | None) -> dict[str, Any]:
    if limits is None:
        return {"pool_size": 5, "max_overflow": 20}
    # All are kept, so that under load none is opened anew for each use.
    return {"pool_size": limits.max_connections, "max_overflow": 0, "pool_timeout": limits.pool.total_seconds()}


def _open_postgresql(url: sa.URL, limits: DatabaseLimits | None) -> Database:
    arguments: dict[str, Any] = dict(UNPREPARED)
    if limits is not None:
        statement, lock, idle = (
            int(limit.total_seconds() * 1000) for limit in (limits.statement, limits.lock, limits.idle_transaction)
        )
        # A host that is gone sends nothing: without these, a statement waits for it for hours.
        given = {
            "connect_timeout": max(2, int(limits.connect.total_seconds())),
            "tcp_user_timeout": statement,
            "keepalives_idle": 2,
            "keepalives_interval": 1,
            "keepalives_count": 2,
        }
        arguments |= {name: value for name, value in given.items() if name not in url.query}
    engine = sa.create_engine(
        url,
        pool_pre_ping=True,
        json_serializer=dump_json,
        hide_parameters=True,
        connect_args=arguments,
        **_pool_options(limits),
    )
    if limits is not None:
        set_limits = (
            f"SELECT set_config('statement_timeout', '{statement}', true), set_config('lock_timeout', '{lock}', true), "
            f"set_config('idle_in_transaction_session_timeout', '{idle}', true)"
        )

        @event.listens_for(engine, "begin")
        def limit_waiting(connection: sa.Connection) -> None:
            connection.exec_driver_sql(set_limits)  # of a session, a pooler would give it to somebody else

    return Database(engine)


def _open_sqlite(url: sa.URL, limits: DatabaseLimits | None) -> Database:
    if not url.database or ":memory:" in url.database or url.query.get("mode") == "memory":
        raise ValueError("the SQLite database must be a file, since several processes share it: sqlite:///PATH")
    if sqlite3.sqlite_version_info < SQLITE_VERSION:
        least = ".".join(map(str, SQLITE_VERSION))
        raise ValueError(f"bexp needs SQLite {least} or later, and this Python has {sqlite3.sqlite_version}")
    path = Path(url.database).expanduser().absolute()
    make_private_folder(path.parent)
    _warn_if_exposed(path)
    busy_timeout = limits.lock if limits is not None else SQLITE_BUSY_TIMEOUT
    engine = sa.create_engine(
        url.set(database=str(path)),
        json_serializer=dump_json,
        hide_parameters=True,
        connect_args={"timeout": busy_timeout.total_seconds()},
        **_pool_options(limits),
    )

    @event.listens_for(engine, "do_connect")
    def create(*_: object) -> None:
        # SQLite itself would let the umask decide. Its journals get the mode of the file.
        with suppress(OSError):  # it is there already, or SQLite will say what is wrong
            os.close(private(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: object) -> None:
        # The driver's own transaction handling neither begins before reads nor takes the write lock early.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return Database(engine, limits.turn if limits is not None else SQLITE_BUSY_TIMEOUT)


@cache
def _warn_if_exposed(path: Path) -> None:
    """Warn, once in a process, that other users can read the file. Only its owner may change its mode."""
    with suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH and all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents):
            _log.warning("every user of this machine can read the database; to end that: chmod 600 %s", path)
