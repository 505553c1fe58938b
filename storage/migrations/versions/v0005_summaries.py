"""What a list shows of an exploration, in columns of its own, so that no stored document is read for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_PAGE = 200


def upgrade() -> None:
    op.add_column("bexp_jobs", sa.Column("model_name", sa.String(128), nullable=False, server_default="unknown"))
    op.add_column("bexp_jobs", sa.Column("micro_batch_size", sa.Integer()))
    op.add_column("bexp_jobs", sa.Column("confidence", sa.Integer()))
    jobs = sa.table(
        "bexp_jobs",
        *(sa.column(name) for name in ("id", "model_name", "micro_batch_size", "confidence")),
        sa.column("request", sa.JSON()),
        sa.column("recommendation", sa.JSON()),
    )
    connection = op.get_bind()
    last = ""
    while True:
        query = sa.select(jobs.c.id, jobs.c.request, jobs.c.recommendation).where(jobs.c.id > last)
        page = connection.execute(query.order_by(jobs.c.id).limit(_PAGE)).all()
        for job in page:
            values = {"model_name": _model_name(job.request), **_recommended(job.recommendation)}
            connection.execute(sa.update(jobs).where(jobs.c.id == job.id).values(**values))
        if len(page) < _PAGE:
            return
        last = page[-1].id


def downgrade() -> None:
    for name in ("confidence", "micro_batch_size", "model_name"):
        op.drop_column("bexp_jobs", name)


def _model_name(request: Any) -> str:
    document = request if isinstance(request, dict) else {}
    model, config = document.get("model"), document.get("hf_config")
    named = [
        str(config.get("_name_or_path") or "").rstrip("/").split("/")[-1] if isinstance(config, dict) else None,
        config.get("model_type") if isinstance(config, dict) else None,
        model.get("name") if isinstance(model, dict) else None,
        document.get("target"),
    ]
    return next((name[:128] for name in named if isinstance(name, str) and name), "unknown")


def _recommended(recommendation: Any) -> dict[str, int | None]:
    document = recommendation if isinstance(recommendation, dict) else {}
    candidate = document.get("candidate")
    size = candidate.get("micro_batch_size") if isinstance(candidate, dict) else None
    confidence = document.get("confidence")
    return {
        "micro_batch_size": size if isinstance(size, int) else None,
        "confidence": confidence if isinstance(confidence, int) else None,
    }
