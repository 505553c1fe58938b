"""The election of one process for a role, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.leaders import give_up_role, hold_role
from bexp.storage.tables import leaders

TERM = timedelta(seconds=60)


def expire(database: Database, after: timedelta) -> None:
    with database.begin() as connection:
        connection.execute(sa.update(leaders).values(expires_at=database.clock(TERM - after)))


def test_one_holds_a_role_until_it_expires_or_is_given_up(database: Database) -> None:
    assert hold_role(database, "keeper", "a", TERM)
    assert not hold_role(database, "keeper", "b", TERM)
    assert hold_role(database, "other", "b", TERM)
    expire(database, TERM * 0.9)
    assert not hold_role(database, "keeper", "b", TERM)
    assert hold_role(database, "keeper", "a", TERM)
    give_up_role(database, "keeper", "b")
    assert not hold_role(database, "keeper", "b", TERM)
    expire(database, TERM)
    assert hold_role(database, "keeper", "b", TERM)
    assert not hold_role(database, "keeper", "a", TERM)
    give_up_role(database, "keeper", "b")
    assert hold_role(database, "keeper", "a", TERM)


def test_a_role_does_not_wait_for_a_clock_that_was_set_back(database: Database) -> None:
    assert hold_role(database, "keeper", "a", TERM)
    expire(database, -TERM)
    assert not hold_role(database, "keeper", "b", TERM)
    expire(database, -timedelta(hours=1))
    assert hold_role(database, "keeper", "b", TERM)
    assert not hold_role(database, "keeper", "a", TERM)


def test_a_holder_writes_only_when_half_of_its_term_is_over(database: Database) -> None:
    def read_end() -> datetime:
        with database.read() as connection:
            end: datetime = connection.execute(sa.select(leaders.c.expires_at)).scalar_one()
            return end

    hold_role(database, "keeper", "a", TERM)
    first = read_end()
    hold_role(database, "keeper", "a", TERM)
    assert read_end() == first
    expire(database, TERM * 0.6)
    hold_role(database, "keeper", "a", TERM)
    assert read_end() > first


def test_one_of_those_who_ask_at_once_is_elected(open_url: Callable[[str], Database], database_url: str) -> None:
    databases = [open_url(database_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        elected = list(pool.map(lambda pair: hold_role(pair[1], "keeper", str(pair[0]), TERM), enumerate(databases)))
    assert elected.count(True) == 1
