"""The unit of the rate in a list of explorations."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("bexp_jobs", sa.Column("rate_unit", sa.String(16)))
    documents = [sa.column(name, sa.JSON) for name in ("recommendation", "answer")]
    recommendation, answer = documents
    jobs = sa.table("bexp_jobs", sa.column("rate_unit", sa.String), *documents)
    units = (recommendation["rate_unit"], answer[("variants", 0, "recommendation", "rate_unit")])
    for unit in units:  # a document names only another unit than tokens
        op.execute(sa.update(jobs).where(unit.as_string() == "samples").values(rate_unit="samples"))
