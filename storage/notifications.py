"""News between processes on PostgreSQL (LISTEN and NOTIFY): a job has new events, or a job was queued.

A notification saves a reader from polling, and nothing depends on it: a reader that hears nothing still polls, at
longer intervals. SQLite has no notifications. A pooler that shares connections by transaction passes none on. A
listener notices such a pooler by a notification of its own.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from bexp.storage.database import Database

if TYPE_CHECKING:
    import psycopg

NEW_EVENTS = "bexp_events"
"""The channel whose message is `<job id> <seq of the job's last event>`."""

QUEUED_JOBS = "bexp_jobs"
"""The channel whose message is empty: there may be a job to claim."""

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 4.0
PROBE_SECONDS = 3.0
"""The wait of a listener for its own notification."""
PROBE_PAUSE_SECONDS = 60.0
_ROUND_SECONDS = 0.5
"""The wait of the thread for a notification, after which it looks whether it should end."""

_MESSAGES = sa.func.unnest(sa.bindparam("messages", type_=postgresql.ARRAY(sa.Text)))
_NOTIFY = sa.select(sa.func.pg_notify(sa.bindparam("channel", type_=sa.Text), _MESSAGES))

logger = logging.getLogger(__name__)


def notify(database: Database, connection: sa.Connection, channel: str, messages: Sequence[str] = ("",)) -> None:
    """Notify the listeners of `channel` when the transaction of `connection` commits; on SQLite, do nothing."""
    if database.is_postgresql:
        connection.execute(_NOTIFY, {"channel": channel, "messages": list(messages)})


def notified(channel: str) -> sa.ColumnElement[str]:
    """Return the expression that a statement of PostgreSQL evaluates to do the same as `notify`."""
    return sa.func.pg_notify(channel, "")


def notify_events(database: Database, connection: sa.Connection, last_seqs: Mapping[str, int]) -> None:
    """Notify listeners that jobs, given by their ids, have events up to these numbers."""
    notify(database, connection, NEW_EVENTS, [f"{job_id} {last_seq}" for job_id, last_seq in last_seqs.items()])


def parse_events_message(message: str) -> tuple[str, int]:
    """Return the job id and the seq in a message of NEW_EVENTS."""
    job_id, _, seq = message.partition(" ")
    return job_id, int(seq)


class Listener:
    """A thread that listens to a channel of PostgreSQL, over one of the database's pooled connections.

    `receive` gets each message, in that thread. After each connect it gets None: messages may have been missed, so the
    receiver should read what it waits for. A lost connection is opened again after at most 4 s. A connection that
    passes on no notifications is tried again after a minute. On SQLite nothing happens, and `is_listening` stays false.
    """

    def __init__(self, database: Database, channel: str, receive: Callable[[str | None], None]) -> None:
        self.is_listening = False
        self._database = database
        self._channel = channel
        self._receive = receive
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_listening, name=f"listener-{channel}", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        if self._database.is_postgresql:
            self._thread.start()

    def close(self) -> None:
        """End the thread, which takes half a second."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _keep_listening(self) -> None:
        import psycopg  # noqa: PLC0415 - only where the database is PostgreSQL

        pause = FIRST_PAUSE_SECONDS
        while not self._ended.is_set():
            try:
                with self._database.engine.connect() as connection:
                    try:
                        passes_on = self._listen(connection)
                    finally:
                        connection.invalidate()  # nobody else should get a connection that listens
                if not passes_on and not self._ended.is_set():
                    logger.info("the database passes no notifications on, as behind a pooler, and is polled")
                    self._ended.wait(PROBE_PAUSE_SECONDS)
            except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
                if self.is_listening:
                    pause = FIRST_PAUSE_SECONDS
                self.is_listening = False
                reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
                logger.warning("no notifications from the database, which is polled meanwhile: %s", reason)
                self._ended.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self.is_listening = False

    def _listen(self, connection: sa.Connection) -> bool:
        """Listen until the end, or until the connection is lost; return false if it passes no notifications on."""
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        driver = cast("psycopg.Connection[object]", connection.connection.driver_connection)
        if not self._passes_on(connection, driver):
            return False
        connection.exec_driver_sql(f"LISTEN {self._channel}")
        self.is_listening = True
        self._receive(None)
        while not self._ended.is_set():
            for notification in driver.notifies(timeout=_ROUND_SECONDS):
                self._receive(notification.payload)
        return True

    def _passes_on(self, connection: sa.Connection, driver: psycopg.Connection[object]) -> bool:
        """Return whether a notification that is sent over another connection arrives."""
        probe, own = f"{self._channel}_probe", secrets.token_hex(8)
        connection.exec_driver_sql(f"LISTEN {probe}")
        with self._database.begin() as other:
            notify(self._database, other, probe, [own])
        ends_at = time.monotonic() + PROBE_SECONDS
        while (left := ends_at - time.monotonic()) > 0 and not self._ended.is_set():
            heard = list(driver.notifies(timeout=min(left, _ROUND_SECONDS), stop_after=1))
            if any(notification.payload == own for notification in heard):
                connection.exec_driver_sql(f"UNLISTEN {probe}")
                return True
        return False
