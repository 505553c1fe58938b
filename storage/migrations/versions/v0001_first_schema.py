"""Jobs, their events and trials, the workers, and the tokens of the API."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "bexp_jobs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("device_kind", sa.String(16)),
        sa.Column("devices_needed", sa.Integer(), nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("queued_at", _MOMENT, nullable=False),
        sa.Column("started_at", _MOMENT),
        sa.Column("finished_at", _MOMENT),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("num_releases", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(128)),
        sa.Column("lease_expires_at", _MOMENT),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("fingerprint", sa.String(64)),
        sa.Column("report", sa.JSON()),
        sa.Column("space", sa.JSON()),
        sa.Column("recommendation", sa.JSON()),
        sa.Column("answer", sa.JSON()),
        sa.Column("error", sa.Text()),
        sa.Column("waiting_reason", sa.Text()),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("body_hash", sa.String(64)),
        sa.PrimaryKeyConstraint("id", name="pk_bexp_jobs"),
        sa.UniqueConstraint("idempotency_key", name="uq_bexp_jobs_idempotency_key"),
    )
    op.create_index("ix_bexp_jobs_created_at_id", "bexp_jobs", ["created_at", "id"])
    op.create_index("ix_bexp_jobs_state_created_at", "bexp_jobs", ["state", "created_at"])
    op.create_table(
        "bexp_events",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("code", sa.Integer(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["bexp_jobs.id"], name="fk_bexp_events_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_bexp_events"),
    )
    op.create_table(
        "bexp_trials",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("trial", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["bexp_jobs.id"], name="fk_bexp_trials_job_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_bexp_trials"),
    )
    op.create_table(
        "bexp_workers",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("device_kind", sa.String(16), nullable=False),
        sa.Column("device_name", sa.String(255), nullable=False),
        sa.Column("num_devices", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("started_at", _MOMENT, nullable=False),
        sa.Column("last_seen_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_bexp_workers"),
    )
    op.create_table(
        "bexp_tokens",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_bexp_tokens"),
    )
    op.create_index("ix_bexp_tokens_prefix", "bexp_tokens", ["prefix"])


def downgrade() -> None:
    for table in ("bexp_tokens", "bexp_workers", "bexp_trials", "bexp_events", "bexp_jobs"):
        op.drop_table(table)
