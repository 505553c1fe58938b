"""Reports of real runs."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "bexp_run_reports",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["bexp_jobs.id"], name="fk_bexp_run_reports_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_bexp_run_reports"),
    )


def downgrade() -> None:
    op.drop_table("bexp_run_reports")
