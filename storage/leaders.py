"""Elects one of several processes for a role: the holder renews a row, which another process takes when it expires."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.tables import leaders

HOUSEKEEPER = "housekeeper"
"""The role of the API process that notes why jobs wait and deletes what retention does not keep."""


def hold_role(database: Database, role: str, holder: str, term: timedelta) -> bool:
    """Take or renew a role; return whether `holder` has it for the next half of `term` at least.

    This may be called often: the row is written only once half of the term is over. A holder that was frozen for longer
    than its term may go on with its work while another process has the role. A role that seems to be held for longer
    than a term was taken before the clock was set back, and is free.
    """
    half = database.clock(term / 2)
    with database.read() as connection:
        row = connection.execute(
            sa.select(
                leaders.c.holder, (leaders.c.expires_at > half).label("is_fresh"), _is_held(database, term)
            ).where(leaders.c.role == role)
        ).one_or_none()
    if row is not None and row.holder == holder and row.is_fresh:
        return True
    if row is not None and row.holder != holder and row.is_held:
        return False
    values = {"holder": holder, "expires_at": database.clock(term)}
    is_free = (leaders.c.holder == holder) | sa.not_(_is_held(database, term))
    take = database.upsert(leaders, {"role": role}, values, where=is_free)
    with database.begin() as connection:
        return connection.execute(take.returning(leaders.c.role)).one_or_none() is not None


def give_up_role(database: Database, role: str, holder: str) -> None:
    """Let another process take a role at once, if `holder` has it."""
    with database.begin() as connection:
        connection.execute(sa.delete(leaders).where(leaders.c.role == role, leaders.c.holder == holder))


def _is_held(database: Database, term: timedelta) -> sa.ColumnElement[bool]:
    return leaders.c.expires_at.between(database.clock(), database.clock(2 * term)).label("is_held")
