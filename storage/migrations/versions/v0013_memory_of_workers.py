"""A worker tells how much memory a job may use, because an answer for another limit does not serve."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("bexp_workers", sa.Column("memory_limit_bytes", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("bexp_workers", "memory_limit_bytes")
