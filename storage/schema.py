"""The schema of a database: its upgrade, the check whether it is current, and a write that shows if one succeeds.

A revision has four digits, and the first two are its generation. Within a generation, migrations only add what an
earlier version can leave alone: tables, indexes, and columns that may be null or have a default. So processes of two
versions run side by side. A later generation is refused by earlier versions.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from filelock import FileLock

from bexp.storage.database import SQLITE_WAL_IS_SAFE, Database
from bexp.storage.tables import PREFIX

VERSION_TABLE = f"{PREFIX}schema_version"
"""Not Alembic's default name, which Optuna's own migrations use in the same database."""

_MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = int.from_bytes(b"bexp-ddl", "big")
_LOCK_SECONDS = 120.0
_LOCK_MILLISECONDS = 300
"""The wait for the lock of a table, below PostgreSQL's `deadlock_timeout` of a second."""
_PAUSE_SECONDS = 0.1
_LOCKED = frozenset({"55P03", "40P01"})
"""PostgreSQL's codes of a lock that is not free in time, and of a deadlock."""


class NewerSchemaError(sa.exc.SQLAlchemyError):
    """A later version of this program has upgraded the database."""

    def __init__(self) -> None:
        super().__init__("a later version of bexp has upgraded the database; use that version")


def include_name(name: str | None, kind: str, parents: object) -> bool:
    """Return whether a name belongs to this schema: Alembic's filter, which leaves Optuna's tables out."""
    return kind != "table" or (name is not None and name.startswith(PREFIX) and name != VERSION_TABLE)


def upgrade(database: Database) -> None:
    """Bring our tables up to date. Several processes may do so at once, also while others work with the database.

    A current schema is only read, so that a process can start while another one holds the write lock.

    Raises:
        NewerSchemaError: the schema is of a later generation.
    """
    if is_current(database):
        return
    # The import takes half a second, and a process that starts on a current schema has no use for it.
    from alembic import command  # noqa: PLC0415 - slow, for upgrades only
    from alembic.config import Config  # noqa: PLC0415 - slow, for upgrades only
    from alembic.util import CommandError  # noqa: PLC0415 - slow, for upgrades only

    with exclusive(database):
        if is_current(database):  # another process was faster
            return
        if not database.is_postgresql:
            _set_journal_mode(database)
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))

        def upgrade_once() -> None:
            with database.begin() as connection:
                if database.is_postgresql:  # to change a large table takes longer than a usual statement may
                    connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
                    connection.execute(sa.text(f"SET LOCAL lock_timeout = '{_LOCK_MILLISECONDS}ms'"))
                config.attributes["connection"] = connection
                try:
                    command.upgrade(config, "head")
                except CommandError as error:  # the revision of the database is not one of ours
                    raise NewerSchemaError from error

        _repeat_while_locked(upgrade_once)


def _repeat_while_locked(change: Callable[[], None]) -> None:
    """Make a change of tables in one transaction, again while others hold their locks.

    A transaction of a request may have read one table and then wait for another, which the change has locked. Neither
    could end. The change gives up before PostgreSQL ends one of the two, which might be the request.
    """
    ends_at = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return change()
        except sa.exc.DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in _LOCKED or time.monotonic() > ends_at:
                raise
        time.sleep(_PAUSE_SECONDS)


def is_current(database: Database) -> bool:
    """Return whether this version can work with the schema, so that `upgrade` has nothing to do."""
    with database.read() as connection:
        return sa.inspect(connection).has_table(VERSION_TABLE) and any(
            revision >= latest_revision() and not _is_later_generation(revision)
            for revision in _read_revisions(connection)
        )


def refuse_later_version(connection: sa.Connection) -> None:
    """Raise NewerSchemaError if a later version of this program has brought the database to another generation.

    This version may be unable to read what the later one stores.
    """
    if is_of_later_version(connection):
        raise NewerSchemaError


def is_of_later_version(connection: sa.Connection) -> bool:
    """Return whether a later version of this program has brought the database to another generation."""
    return any(map(_is_later_generation, _read_revisions(connection)))


def latest_revision() -> str:
    """Return the revision of the last migration."""
    return max(_revisions())


def _is_later_generation(revision: str) -> bool:
    return revision[:2] > latest_revision()[:2]


def try_write(database: Database) -> None:
    """Write the version of the schema again, and commit. Only a write shows a full disk or a lock that nobody frees.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: the database does not take the write.
    """
    version = sa.table(VERSION_TABLE, sa.column("version_num"))
    with database.begin() as connection:
        connection.execute(sa.update(version).values(version_num=version.c.version_num))


@cache
def _revisions() -> Sequence[str]:
    """Return the revisions of the migrations. The name of each one's file begins with it, after a `v`."""
    return [path.name[1:5] for path in (_MIGRATIONS / "versions").glob("v*.py")]


def _read_revisions(connection: sa.Connection) -> Sequence[str]:
    version = sa.table(VERSION_TABLE, sa.column("version_num"))
    return connection.scalars(sa.select(version.c.version_num)).all()


@contextmanager
def exclusive(database: Database, *, wait_seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Keep other processes from changing tables within the context.

    Raises:
        filelock.Timeout: another process changes tables for longer than `wait_seconds` (SQLite).
        sqlalchemy.exc.OperationalError: the same on PostgreSQL.
    """
    path = database.sqlite_path
    if path is not None:
        # Whoever can open the file of the lock can hold it for ever, so no other user may.
        with FileLock(path.with_name(f"{path.name}.upgrade.lock"), timeout=wait_seconds, mode=0o600):
            yield
        return
    # The lock is a transaction's and not a session's, which a pooler may share. Optuna changes its tables over
    # connections of its own, and this one is idle meanwhile.
    with database.begin() as connection:
        for name in ("lock_timeout", "statement_timeout"):
            connection.execute(sa.text(f"SET LOCAL {name} = '{wait_seconds * 1000:.0f}ms'"))
        connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
        yield


def _set_journal_mode(database: Database) -> None:
    mode = "WAL" if SQLITE_WAL_IS_SAFE else "DELETE"
    connection = database.engine.raw_connection()
    try:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA journal_mode={mode}")
        cursor.close()
    except sqlite3.Error as error:  # as SQLAlchemy raises it wherever it runs the statement itself
        raise sa.exc.DBAPIError.instance(f"PRAGMA journal_mode={mode}", None, error, sqlite3.Error) from error
    finally:
        connection.close()
