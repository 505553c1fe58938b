"""Owners of tokens and of jobs, their quotas and turns, and the record of who did what.

What earlier versions stored belongs to the owner `local`. Their tokens keep what they could do: everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_JOBS = ("owned_by", "priority", "claimed_at")
_TOKENS = ("owner", "scopes", "expires_at")


def upgrade() -> None:
    op.add_column("bexp_jobs", sa.Column("owned_by", sa.String(64), nullable=False, server_default="local"))
    op.add_column("bexp_jobs", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("bexp_jobs", sa.Column("claimed_at", sa.DateTime(timezone=True)))
    op.create_index("ix_bexp_jobs_owned_by_created_at", "bexp_jobs", ["owned_by", "created_at"])
    op.add_column("bexp_tokens", sa.Column("owner", sa.String(64), nullable=False, server_default="local"))
    scopes = sa.Column("scopes", sa.String(64), nullable=False, server_default="admin cancel read submit")
    op.add_column("bexp_tokens", scopes)
    op.add_column("bexp_tokens", sa.Column("expires_at", sa.DateTime(timezone=True)))
    op.create_table(
        "bexp_quotas",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("max_queued", sa.Integer()),
        sa.Column("max_running", sa.Integer()),
        sa.Column("max_device_seconds", sa.Integer()),
        sa.PrimaryKeyConstraint("owner", name="pk_bexp_quotas"),
    )
    op.create_table(
        "bexp_usage",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("device_seconds", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_bexp_usage"),
    )
    op.create_table(
        "bexp_audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("token", sa.String(64)),
        sa.Column("origin", sa.String(255)),
        sa.PrimaryKeyConstraint("id", name="pk_bexp_audit"),
    )
    op.create_index("ix_bexp_audit_at", "bexp_audit", ["at"])
    jobs = sa.table("bexp_jobs", sa.column("id"), sa.column("idempotency_key"))
    connection = op.get_bind()
    query = sa.select(jobs.c.id, jobs.c.idempotency_key).where(jobs.c.idempotency_key.is_not(None))
    for job in connection.execute(query).all():
        hashed = hashlib.sha256(f"local\0{job.idempotency_key}".encode()).hexdigest()
        connection.execute(sa.update(jobs).where(jobs.c.id == job.id).values(idempotency_key=hashed))


def downgrade() -> None:
    for table in ("bexp_audit", "bexp_usage", "bexp_quotas"):
        op.drop_table(table)
    for name in _TOKENS:
        op.drop_column("bexp_tokens", name)
    op.drop_index("ix_bexp_jobs_owned_by_created_at", "bexp_jobs")
    for name in _JOBS:
        op.drop_column("bexp_jobs", name)
