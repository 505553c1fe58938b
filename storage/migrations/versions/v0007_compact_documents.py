"""Documents and messages are stored in few bytes. What is there stays as it is and is read as before."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from bexp.storage.compact import unpack

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

COLUMNS = (
    ("bexp_trials", ("job_id", "number"), "trial", "json"),
    ("bexp_events", ("job_id", "seq"), "data", "json"),
    ("bexp_events", ("job_id", "seq"), "message", "text"),
    ("bexp_jobs", ("id",), "report", "json"),
    ("bexp_jobs", ("id",), "space", "json"),
    ("bexp_jobs", ("id",), "recommendation", "json"),
    ("bexp_jobs", ("id",), "answer", "json"),
)


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":  # it stores bytes in any column
        return
    for table, _, column, _ in COLUMNS:
        op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} TYPE bytea USING convert_to({column}::text, 'UTF8')")


def downgrade() -> None:
    connection = op.get_bind()
    is_sqlite = connection.dialect.name == "sqlite"
    for table, keys, column, kind in COLUMNS:
        rows = sa.table(table, *(sa.column(key) for key in keys), sa.column(column))
        for row in connection.execute(sa.select(rows)).all():
            stored = getattr(row, column)
            if stored is None or isinstance(stored, str):
                continue
            plain = unpack(bytes(stored))
            here = [rows.c[key] == getattr(row, key) for key in keys]
            connection.execute(sa.update(rows).where(*here).values({column: plain if is_sqlite else plain.encode()}))
        if not is_sqlite:
            op.execute(
                f"ALTER TABLE {table} ALTER COLUMN {column} TYPE {kind} USING convert_from({column}, 'UTF8')::{kind}"
            )
