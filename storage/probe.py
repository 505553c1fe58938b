"""Whether a database takes writes: a full disk and a lock that nobody gives back show only when one is tried."""

from __future__ import annotations

import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.schema import VERSION_TABLE


def try_write(database: Database) -> None:
    """Write the version of the schema again, and commit.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: the database does not take it.
    """
    version = sa.table(VERSION_TABLE, sa.column("version_num"))
    with database.begin() as connection:
        connection.execute(sa.update(version).values(version_num=version.c.version_num))
