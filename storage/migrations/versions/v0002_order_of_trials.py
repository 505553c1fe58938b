"""The order in which trials are stored."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

_UNIQUE = "uq_bexp_trials_job_id_seq"


def upgrade() -> None:
    op.add_column("bexp_trials", sa.Column("seq", sa.Integer()))
    # Numbers were the cursors until now: those that clients hold stay what they are.
    op.execute("UPDATE bexp_trials SET seq = number")
    with op.batch_alter_table("bexp_trials") as batch:
        batch.alter_column("seq", existing_type=sa.Integer(), nullable=False)
        batch.create_unique_constraint(_UNIQUE, ["job_id", "seq"])


def downgrade() -> None:
    with op.batch_alter_table("bexp_trials") as batch:
        batch.drop_constraint(_UNIQUE, type_="unique")
        batch.drop_column("seq")
