"""Which requests ask the same, what measured their answers, labels, and what workers say of their devices."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

JOB_COLUMNS = (
    ("request_key", sa.String(64)),
    ("software", sa.String(255)),
    ("serves_up_to", sa.Integer()),
    ("reused_from", sa.String(32)),
    ("measured_at", sa.DateTime(timezone=True)),
)


def upgrade() -> None:
    for name, kind in JOB_COLUMNS:
        op.add_column("bexp_jobs", sa.Column(name, kind))
    op.create_index("ix_bexp_jobs_request_key", "bexp_jobs", ["request_key"])
    op.create_index("ix_bexp_jobs_reused_from", "bexp_jobs", ["reused_from"])
    op.create_index("ix_bexp_jobs_model_name_created_at", "bexp_jobs", ["model_name", "created_at"])
    op.add_column("bexp_workers", sa.Column("devices", sa.String(255), nullable=False, server_default=""))
    op.add_column("bexp_workers", sa.Column("versions", sa.JSON(), nullable=False, server_default="{}"))
    op.create_table(
        "bexp_labels",
        sa.Column(
            "job_id",
            sa.String(32),
            sa.ForeignKey("bexp_jobs.id", name="fk_bexp_labels_job_id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("key", sa.String(63), nullable=False),
        sa.Column("value", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_bexp_labels"),
    )
    op.create_index("ix_bexp_labels_key_value_job_id", "bexp_labels", ["key", "value", "job_id"])


def downgrade() -> None:
    op.drop_table("bexp_labels")
    for name in ("versions", "devices"):
        op.drop_column("bexp_workers", name)
    op.drop_index("ix_bexp_jobs_model_name_created_at", "bexp_jobs")
    op.drop_index("ix_bexp_jobs_reused_from", "bexp_jobs")
    op.drop_index("ix_bexp_jobs_request_key", "bexp_jobs")
    for name, _ in reversed(JOB_COLUMNS):
        op.drop_column("bexp_jobs", name)
