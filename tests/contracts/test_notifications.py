"""Notifications on PostgreSQL come with the commit, and a listener is told when it may have missed some."""

from __future__ import annotations

import queue as queues
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.notifications import NEW_EVENTS, Listener, notify_events, parse_events_message


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
        assert heard.get(timeout=60) is None
        with pytest.raises(ZeroDivisionError), postgresql.begin() as connection:
            notify_events(postgresql, connection, {"rolled-back": 1})
            raise ZeroDivisionError
        with postgresql.begin() as connection:
            notify_events(postgresql, connection, {"abc": 7})
        message = heard.get(timeout=60)
        assert message is not None
        assert parse_events_message(message) == ("abc", 7)
        assert end_listeners(postgresql) == 1
        assert heard.get(timeout=60) is None
        with postgresql.begin() as connection:
            notify_events(postgresql, connection, {"abc": 8})
        assert heard.get(timeout=60) == "abc 8"
    finally:
        listener.close()
    assert not listener.is_listening
