"""The targets of workers, and the target that a job needs."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("bexp_jobs", sa.Column("target", sa.String(64), nullable=False, server_default="bexp"))
    op.add_column("bexp_workers", sa.Column("targets", sa.JSON(), nullable=False, server_default="{}"))
    jobs = sa.table("bexp_jobs", sa.column("id"), sa.column("request", sa.JSON()), sa.column("target"))
    connection = op.get_bind()
    for job in connection.execute(sa.select(jobs.c.id, jobs.c.request)).all():
        request = job.request if isinstance(job.request, dict) else {}
        target = request.get("target") or ("transformers" if request.get("hf_config") else "bexp")
        if target != "bexp":
            connection.execute(sa.update(jobs).where(jobs.c.id == job.id).values(target=target))


def downgrade() -> None:
    op.drop_column("bexp_workers", "targets")
    op.drop_column("bexp_jobs", "target")
