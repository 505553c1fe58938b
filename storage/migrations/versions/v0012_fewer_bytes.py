"""Requests are stored in few bytes, recommendations as what differs from the one before, and SQLite needs no rowids."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from bexp.storage.compact import pack, unpack
from bexp.storage.tables import PREFIX

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

BLOCK = 32
RECOMMENDATION = 202


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _copy_tables(with_rowid=False)
        return
    op.execute("ALTER TABLE bexp_jobs ALTER COLUMN request TYPE bytea USING convert_to(request::text, 'UTF8')")


def downgrade() -> None:
    connection = op.get_bind()
    _unchain(connection)
    jobs = sa.table("bexp_jobs", sa.column("id"), sa.column("request"))
    is_sqlite = connection.dialect.name == "sqlite"
    for row in connection.execute(sa.select(jobs)).all():
        plain = unpack(row.request if isinstance(row.request, str) else bytes(row.request))
        value = plain if is_sqlite else plain.encode()
        connection.execute(sa.update(jobs).where(jobs.c.id == row.id).values(request=value))
    if is_sqlite:
        _copy_tables(with_rowid=True)
    else:
        op.execute("ALTER TABLE bexp_jobs ALTER COLUMN request TYPE json USING convert_from(request, 'UTF8')::json")


def _copy_tables(*, with_rowid: bool) -> None:
    for name in ("events", "trials"):
        options = {"sqlite_with_rowid": with_rowid}
        with op.batch_alter_table(f"{PREFIX}{name}", recreate="always", table_kwargs=options):
            pass


def _unchain(connection: sa.Connection) -> None:
    """Store each recommendation as a whole."""
    events = sa.table("bexp_events", *(sa.column(name) for name in ("job_id", "seq", "code", "message", "data")))
    query = sa.select(events).where(events.c.code == RECOMMENDATION).order_by(events.c.job_id, events.c.seq)
    place: tuple[str, int] | None = None
    before = ("", "")
    for row in connection.execute(query).all():
        if place != (row.job_id, (row.seq - 1) // BLOCK):
            place, before = (row.job_id, (row.seq - 1) // BLOCK), ("", "")
        stored = [value if isinstance(value, str) else bytes(value) for value in (row.message, row.data)]
        before = (unpack(stored[0], before[0]), unpack(stored[1], before[1]))
        here = (events.c.job_id == row.job_id) & (events.c.seq == row.seq)
        change = sa.update(events).where(here)
        connection.execute(change.values(message=pack(before[0]), data=pack(before[1])))
