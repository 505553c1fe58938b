"""Faults of a job's own are counted apart, and a job that was put back waits before its next attempt."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("bexp_jobs", sa.Column("num_faults", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("bexp_jobs", sa.Column("not_before", sa.DateTime(timezone=True)))


def downgrade() -> None:
    op.drop_column("bexp_jobs", "not_before")
    op.drop_column("bexp_jobs", "num_faults")
