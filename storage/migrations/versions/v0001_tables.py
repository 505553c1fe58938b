"""All tables."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_IS_QUEUED = sa.text("state = 'queued'")
_JSON = sa.JSON()
_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "bexp_jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("request", _JSON, nullable=False),
        sa.Column("model_name", sa.String(128), nullable=False),
        sa.Column("device_kind", sa.String(16)),
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("devices_needed", sa.Integer, nullable=False),
        sa.Column("memory_needed_bytes", sa.BigInteger),
        sa.Column("own_worker", sa.String(32), nullable=False),
        sa.Column("own_worker_until", _MOMENT),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("queued_at", _MOMENT, nullable=False),
        sa.Column("started_at", _MOMENT),
        sa.Column("finished_at", _MOMENT),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("num_releases", sa.Integer, nullable=False),
        sa.Column("num_faults", sa.Integer, nullable=False),
        sa.Column("not_before", _MOMENT),
        sa.Column("worker", sa.String(128)),
        sa.Column("lease_expires_at", _MOMENT),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("fingerprint", sa.String(64)),
        sa.Column("report", _JSON),
        sa.Column("space", _JSON),
        sa.Column("recommendation", _JSON),
        sa.Column("micro_batch_size", sa.Integer),
        sa.Column("confidence", sa.Integer),
        sa.Column("answer", _JSON),
        sa.Column("error", sa.Text),
        sa.Column("waiting_reason", sa.Text),
        sa.Column("last_seq", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("idempotency_key", sa.String(255), unique=True),
        sa.Column("body_hash", sa.String(64)),
        sa.Column("request_key", sa.String(64), index=True),
        sa.Column("software", sa.Text),
        sa.Column("serves_up_to", sa.Integer),
        sa.Column("reused_from", sa.String(32), index=True),
        sa.Column("measured_at", _MOMENT),
        sa.Column("stored_bytes", sa.BigInteger),
        sa.Column("device_name", sa.String(255)),
        sa.Column("confidence_target", sa.Integer),
        sa.Column("performance", sa.Float),
        sa.Column("tokens_per_second", sa.Float),
        sa.Column("rate_unit", sa.String(16)),
        sa.Column("notes", sa.Text),
        sa.Index(None, "created_at", "id"),
        sa.Index(None, "state", "created_at"),
        sa.Index(None, "owner", "created_at"),
        sa.Index(None, "owner", "stored_bytes"),
        sa.Index(None, "model_name", "created_at"),
        sa.Index("ix_bexp_jobs_searched", "model_name", "device_name", "owner", "id"),
        sa.Index(
            "ix_bexp_jobs_queued",
            *("state", "owner", "priority", "created_at", "id", "own_worker", "device_kind"),
            sqlite_where=_IS_QUEUED,
            postgresql_where=_IS_QUEUED,
        ),
    )
    op.create_table(
        "bexp_labels",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("bexp_jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("key", sa.String(63), primary_key=True),
        sa.Column("value", sa.String(128), nullable=False),
        sa.Index(None, "key", "value", "job_id"),
    )
    op.create_table(
        "bexp_events",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("bexp_jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("code", sa.Integer, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("data", _JSON, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "bexp_recommendations",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("bexp_jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("micro_batch_size", sa.Integer, nullable=False),
        sa.Column("performance", sa.Float, nullable=False),
        sa.Column("confidence", sa.Integer, nullable=False),
        sa.Column("tokens_per_second", sa.Float, nullable=False),
        sa.Column("peak_bytes", sa.BigInteger, nullable=False),
        sa.Column("candidate", _JSON, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "bexp_trials",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("bexp_jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("micro_batch_size", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("tokens_per_second", sa.Float),
        sa.Column("peak_bytes", sa.BigInteger),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("trial", _JSON, nullable=False),
        sa.UniqueConstraint("job_id", "seq"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "bexp_run_reports",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("bexp_jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("report", _JSON, nullable=False),
    )
    op.create_table(
        "bexp_components",
        sa.Column("environment", sa.String(16), primary_key=True),
        sa.Column("subject", sa.String(32), primary_key=True),
        sa.Column("component", sa.String(32), primary_key=True),
        sa.Column("source", sa.String(16), primary_key=True),
        sa.Column("device", sa.String(255), nullable=False),
        sa.Column("versions", sa.String(255), nullable=False),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("measurement", _JSON, nullable=False),
        sa.Index(None, "subject"),
        sa.Index(None, "source"),
        sa.Index(None, "at"),
    )
    op.create_table(
        "bexp_workers",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("device_kind", sa.String(16), nullable=False),
        sa.Column("device_name", sa.Text, nullable=False),
        sa.Column("num_devices", sa.Integer, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("devices", sa.Text, nullable=False),
        sa.Column("versions", _JSON, nullable=False),
        sa.Column("targets", _JSON, nullable=False),
        sa.Column("memory_limit_bytes", sa.BigInteger, nullable=False),
        sa.Column("held_by", sa.Text),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("gpus", _JSON),
        sa.Column("started_at", _MOMENT, nullable=False),
        sa.Column("last_seen_at", _MOMENT, nullable=False),
    )
    op.create_table(
        "bexp_tokens",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("prefix", sa.String(16), nullable=False, index=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(64), nullable=False),
        sa.Column("expires_at", _MOMENT),
    )
    op.create_table(
        "bexp_quotas",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("max_queued", sa.Integer),
        sa.Column("max_running", sa.Integer),
        sa.Column("max_stored_bytes", sa.BigInteger),
    )
    op.create_table(
        "bexp_turns",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("claimed_at", _MOMENT, nullable=False),
    )
    op.create_table(
        "bexp_audit",
        # SQLite counts by itself only in a column of the type INTEGER, which has 64 bits there.
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("at", _MOMENT, nullable=False, index=True),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("token", sa.String(64)),
        sa.Column("origin", sa.String(255)),
    )
    op.create_table(
        "bexp_leaders",
        sa.Column("role", sa.String(32), primary_key=True),
        sa.Column("holder", sa.String(128), nullable=False),
        sa.Column("expires_at", _MOMENT, nullable=False),
    )
