"""What a job takes in the database, and the quota for it."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0103"
down_revision: str | None = "0102"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("bexp_jobs", sa.Column("stored_bytes", sa.BigInteger))
    op.create_index("ix_bexp_jobs_owner_stored_bytes", "bexp_jobs", ["owner", "stored_bytes"])
    op.add_column("bexp_quotas", sa.Column("max_stored_bytes", sa.BigInteger))
