"""The ids of the audit have 64 bits on PostgreSQL, as they always had on SQLite.

PostgreSQL writes the table anew for this, under a lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    _retype(sa.BigInteger())


def downgrade() -> None:
    _retype(sa.Integer())


def _retype(kind: sa.Integer) -> None:
    if op.get_bind().dialect.name == "sqlite":
        return
    op.alter_column("bexp_audit", "id", type_=kind)
    op.execute(f"ALTER SEQUENCE bexp_audit_id_seq AS {kind.compile(op.get_bind().dialect)}")
