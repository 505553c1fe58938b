"""Components that explorations have measured are kept for later ones."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from bexp.storage.compact import CompactJSON

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

TABLE = "bexp_components"


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("environment", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(32), nullable=False),
        sa.Column("component", sa.String(32), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("device", sa.String(255), nullable=False),
        sa.Column("versions", sa.String(255), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("measurement", CompactJSON, nullable=False),
        sa.PrimaryKeyConstraint("environment", "subject", "component", "source", name=op.f(f"pk_{TABLE}")),
    )
    for column in ("subject", "source", "at"):
        op.create_index(op.f(f"ix_{TABLE}_{column}"), TABLE, [column])


def downgrade() -> None:
    op.drop_table(TABLE)
