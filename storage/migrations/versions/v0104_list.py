"""What a list shows of a job without reading its documents, and the text by which lists are searched."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0104"
down_revision: str | None = "0103"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_JOBS = "bexp_jobs"
_BEST = "coalesce(answer -> 'variants' -> 0 -> 'recommendation', recommendation)"
FOUND = {
    "device_name": "report -> 'hardware' ->> 'device_name'",
    "confidence_target": "CAST(request -> 'budget' ->> 'confidence_target' AS INTEGER)",
    "performance": f"CAST({_BEST} ->> 'performance' AS FLOAT)",
    "tokens_per_second": f"CAST(coalesce({_BEST} -> 'whole_model' ->> 'tokens_per_second', "
    f"{_BEST} ->> 'tokens_per_second') AS FLOAT)",
}
"""The new columns, of what is stored already."""


def upgrade() -> None:
    op.add_column(_JOBS, sa.Column("device_name", sa.String(255)))
    op.add_column(_JOBS, sa.Column("confidence_target", sa.Integer))
    op.add_column(_JOBS, sa.Column("performance", sa.Float))
    op.add_column(_JOBS, sa.Column("tokens_per_second", sa.Float))
    jobs = sa.table(_JOBS, *(sa.column(name) for name in FOUND))
    op.execute(sa.update(jobs).values({name: sa.literal_column(text) for name, text in FOUND.items()}))
    op.create_index("ix_bexp_jobs_searched", _JOBS, ["model_name", "device_name", "owner", "id"])
