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
LONGEST_NAME = 255
_BEST = ("answer", "variants", 0, "recommendation"), ("recommendation",)
FOUND = {
    "device_name": ("VARCHAR", [("report", "hardware", "device_name")]),
    "confidence_target": ("INTEGER", [("request", "budget", "confidence_target")]),
    "performance": ("FLOAT", [(*best, "performance") for best in _BEST]),
    "tokens_per_second": (
        "FLOAT",
        [(*best, *place, "tokens_per_second") for best in _BEST for place in (("whole_model",), ())],
    ),
}
"""The new columns, and the places where they are stored already: the first one that has something."""


def upgrade() -> None:
    op.add_column(_JOBS, sa.Column("device_name", sa.String(LONGEST_NAME)))
    op.add_column(_JOBS, sa.Column("confidence_target", sa.Integer))
    op.add_column(_JOBS, sa.Column("performance", sa.Float))
    op.add_column(_JOBS, sa.Column("tokens_per_second", sa.Float))
    jobs = sa.table(_JOBS, *(sa.column(name) for name in FOUND))
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    texts = {
        name: f"CAST(coalesce({', '.join(_read(place, is_postgresql) for place in places)}, NULL) AS {kind})"
        for name, (kind, places) in FOUND.items()
    }
    texts["device_name"] = f"substr({texts['device_name']}, 1, {LONGEST_NAME})"
    op.execute(sa.update(jobs).values({name: sa.literal_column(text) for name, text in texts.items()}))
    op.create_index("ix_bexp_jobs_searched", _JOBS, ["model_name", "device_name", "owner", "id"])


def _read(place: Sequence[str | int], is_postgresql: bool) -> str:
    """Return SQL for what is at `place`: a column, and names and numbers within its document."""
    column, *path = place
    if is_postgresql:
        return f"{column} #>> '{{{','.join(map(str, path))}}}'"
    within = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"json_extract({column}, '${within}')"  # SQLite has operators for it since 3.38, which not every host has
