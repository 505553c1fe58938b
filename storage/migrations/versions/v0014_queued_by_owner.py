"""An index of the queued jobs of each owner, which a submission counts for a quota."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_IS_QUEUED = "state = 'queued'"


def upgrade() -> None:
    op.create_index(
        "ix_bexp_jobs_queued",
        "bexp_jobs",
        ["owned_by", "state"],
        sqlite_where=sa.text(_IS_QUEUED),
        postgresql_where=sa.text(_IS_QUEUED),
    )


def downgrade() -> None:
    op.drop_index("ix_bexp_jobs_queued", "bexp_jobs")
