"""Databases of a PostgreSQL server for one test each. One that a test leaves as it was, but for rows, serves the next.

To delete its rows takes a hundredth of the processor time of making and dropping one, or of truncating its tables.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import psycopg
import sqlalchemy as sa

_SHAPE = """
SELECT string_agg(found::text, '' ORDER BY found::text) FROM (
  SELECT attrelid::regclass::text, attname::text, atttypid::regtype::text, attnotnull FROM pg_attribute
  JOIN pg_class ON pg_class.oid = attrelid
  WHERE relnamespace = current_schema()::regnamespace AND NOT attisdropped
  UNION ALL SELECT setconfig::text, '', '', true FROM pg_db_role_setting
  JOIN pg_database ON pg_database.oid = setdatabase WHERE datname = current_database()
) AS found
"""
_END_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid != pg_backend_pid()
"""
_RESTART = "SELECT setval(seqrelid, seqstart, false) FROM pg_sequence"
_LARGE_BYTES = 2**20  # what is left of deleted rows would slow the next test down


class FreshDatabases:
    """Copies of a template."""

    def __init__(self, server: str, template: str) -> None:
        self._server = server
        self._template = template
        self._spare: list[str] = []

    @contextmanager
    def one(self) -> Iterator[str]:
        """The URL of a database that is as the template."""
        if not self._spare:
            self._spare.append(f"test_{uuid.uuid4().hex}")
            execute(self._server, f"CREATE DATABASE {self._spare[0]} TEMPLATE {self._template}")
        name = self._spare.pop()
        url = with_name(self._server, name)
        try:
            yield url
        finally:
            if self._empties(url):
                self._spare.append(name)
            else:
                execute(self._server, f"DROP DATABASE {name} WITH (FORCE)")

    def _empties(self, url: str) -> bool:
        """Empty a database, unless a test has changed more than rows, or has filled it."""
        shape, filled, empty = self._told
        try:
            with _connected(url) as connection:
                connection.execute(_END_OTHERS)
                # Those that end may be about to commit; they are waited for.
                _run(connection, f"BEGIN; LOCK TABLE {', '.join(empty)} IN SHARE ROW EXCLUSIVE MODE")
                if _bytes(connection, empty) > _LARGE_BYTES:
                    return False
                if _shape(connection) != shape or _rows(connection, filled) != filled:
                    return False
                deletes = "; ".join(f"DELETE FROM {name}" for name in empty)
                _run(connection, f"SET LOCAL session_replication_role = replica; {deletes}; {_RESTART}; COMMIT")
        except psycopg.Error:
            return False
        return True

    @cached_property
    def _told(self) -> tuple[str, dict[str, str], list[str]]:
        """Columns, indexes and settings of the template, its tables that have rows, with these, and all others."""
        with _connected(with_name(self._server, self._template)) as connection:
            names = _run(connection, "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
            every = _rows(connection, [name for (name,) in names])
            shape = _shape(connection)
        return shape, {name: rows for name, rows in every.items() if rows}, [n for n, rows in every.items() if not rows]


def with_name(server: str, name: str) -> str:
    """The URL of another database of a server."""
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)


def execute(server: str, statement: str) -> None:
    """Execute a statement outside of a transaction."""
    with _connected(server) as connection:
        _run(connection, statement)


def _connected(url: str) -> psycopg.Connection:
    return psycopg.connect(sa.make_url(url).set(drivername="postgresql").render_as_string(False), autocommit=True)


def _run(connection: psycopg.Connection, statements: str) -> psycopg.Cursor:
    return connection.execute(statements.encode())


def _shape(connection: psycopg.Connection) -> str:
    return str(_value(connection, _SHAPE))


def _rows(connection: psycopg.Connection, tables: Iterable[str]) -> dict[str, str]:
    asked = {name: f"SELECT string_agg(t::text, '' ORDER BY t::text) FROM {name} AS t" for name in tables}
    return {name: _value(connection, query) or "" for name, query in asked.items()}


def _bytes(connection: psycopg.Connection, tables: Iterable[str]) -> int:
    return int(_value(connection, "SELECT " + " + ".join(f"pg_table_size('{name}')" for name in tables)))


def _value(connection: psycopg.Connection, query: str) -> Any:
    (value,) = _run(connection, query).fetchone() or (None,)
    return value
