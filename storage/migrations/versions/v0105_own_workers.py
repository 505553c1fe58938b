"""Which worker alone may take a job, and what memory a job needs."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0105"
down_revision: str | None = "0104"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("bexp_jobs", sa.Column("memory_needed_bytes", sa.BigInteger))
    op.add_column("bexp_jobs", sa.Column("own_worker", sa.String(32), nullable=False, server_default=""))
    op.add_column("bexp_jobs", sa.Column("own_worker_until", sa.DateTime(timezone=True)))
    op.add_column("bexp_workers", sa.Column("memory_bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("bexp_workers", sa.Column("name", sa.String(32), nullable=False, server_default=""))
