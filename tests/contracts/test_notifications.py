"""Notifications on PostgreSQL come with the commit, and a listener is told when it may have missed some."""

from __future__ import annotations

import queue as queues
from collections.abc import Callable
from unittest.mock import MagicMock

import psycopg
import pytest
import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.notifications import NEW_EVENTS, Listener, notify_events, parse_events_message
from tests.waits import PATIENCE_SECONDS, Waits


def end_listeners(database: Database) -> int:
    """Cut the connections that listen; return how many there were."""
    query = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = "
    with database.read() as connection:
        return int(connection.scalar(sa.text(query + "current_database()")) or 0)


def test_a_listener_gets_what_is_committed_and_is_told_when_it_may_have_missed_something(
    postgresql_url: str, open_url: Callable[[str], Database]
) -> None:
    postgresql = open_url(postgresql_url)
    heard: queues.Queue[str | None] = queues.Queue()
    listener = Listener(postgresql, NEW_EVENTS, heard.put)
    listener.start()
    try:
        assert heard.get(timeout=PATIENCE_SECONDS) is None
        with pytest.raises(ZeroDivisionError), postgresql.begin() as connection:
            notify_events(postgresql, connection, {"rolled-back": 1})
            raise ZeroDivisionError
        with postgresql.begin() as connection:
            notify_events(postgresql, connection, {"abc": 7})
        message = heard.get(timeout=PATIENCE_SECONDS)
        assert message is not None
        assert parse_events_message(message) == ("abc", 7)
        assert end_listeners(postgresql) == 1
        assert heard.get(timeout=PATIENCE_SECONDS) is None
        with postgresql.begin() as connection:
            notify_events(postgresql, connection, {"abc": 8})
        assert heard.get(timeout=PATIENCE_SECONDS) == "abc 8"
    finally:
        listener.close()
    assert not listener.is_listening


def test_nothing_is_told_on_sqlite(sqlite_database: Database) -> None:
    listener = Listener(sqlite_database, NEW_EVENTS, lambda _: None)
    for act in (listener.start, listener.close):
        act()
        assert not listener.is_listening


def test_a_lost_connection_is_opened_again_ever_more_rarely_and_a_silent_one_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a server: neither needs one."""
    listener = Listener(MagicMock(is_postgresql=True), NEW_EVENTS, lambda _: None)
    ended = listener._ended = Waits(9)
    listens = iter([None] * 6 + ["first"])

    def listen(_: object) -> bool:
        assert not listener.is_listening, "while it tries again, others poll"
        listener.is_listening = next(listens, None) is not None
        if len(ended.seconds) % 2:
            raise psycopg.OperationalError("the connection is closed\nby the server")
        raise sa.exc.OperationalError("LISTEN", {}, ConnectionError("refused\nIs it running?"))

    monkeypatch.setattr(listener, "_listen", listen)
    listener._keep_listening()
    assert listener._ended.seconds == [0.25, 0.5, 1, 2, 4, 4, 0.25, 0.5, 1]
    told = [message.partition("which is polled meanwhile: ")[2] for message in caplog.messages]
    assert told[:2] == ["refused", "the connection is closed"]
    listener._ended = Waits(2)
    monkeypatch.setattr(listener, "_listen", lambda _: False)
    listener._keep_listening()
    assert listener._ended.seconds == [60, 60]
    assert not listener.is_listening
    assert listener._thread.daemon, "a process that ends does not wait for it"
