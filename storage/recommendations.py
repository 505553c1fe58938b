"""The recommendations of a job: one row for each BEXP202, which `insert_events` writes with its event.

The row and the event together hold what the recommendation says of its candidate, each figure once. How it compares
with other candidates stands in the job's latest recommendation and in its answer, with its notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from bexp.explorer.records.recommendation import Recommendation
from bexp.storage.tables import recommendations

_LEFT_OUT = frozenset(
    {
        *("largest_micro_batch", "largest_without_recompute", "stock", "untiled", "runner_up"),
        *("dividing", "dividing_batch_sizes", "memory_choices", "notes"),
        *("alternatives", "expert_modes", "plain", "parts", "picture"),
    }
)
"""Fields of a recommendation, and of its plan, that are left out here."""

_COLUMNS = {
    "candidate": "candidate",
    "performance": "performance",
    "confidence": "confidence",
    "tokens_per_second": "tokens_per_second",
    "measured_peak_bytes": "peak_bytes",
}
"""Fields of a recommendation with a column of their own, and the column."""


def split_recommendation(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the columns of a recommendation's row, and the rest of the document, which its event holds."""
    columns = {column: document[field] for field, column in _COLUMNS.items()}
    columns["micro_batch_size"] = document["candidate"]["micro_batch_size"]
    columns["candidate"] = _stated(columns["candidate"])
    rest = {field: value for field, value in _stated(document).items() if field not in {*_LEFT_OUT, *_COLUMNS}}
    rest["base"] = _stated(rest["base"])
    if "plan" in rest:
        rest["plan"] = {field: value for field, value in _stated(rest["plan"]).items() if field not in _LEFT_OUT}
    return columns, rest


def join_recommendation(row: sa.Row[Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document that `split_recommendation` was given, without what is left out."""
    columns = {field: getattr(row, column) for field, column in _COLUMNS.items()}
    absent = dict.fromkeys(name for name, field in Recommendation.model_fields.items() if field.is_required())
    return Recommendation.model_validate({**absent, **rest, **columns}).model_dump(mode="json")


def select_columns() -> list[sa.Column[Any]]:
    """Return the columns that `join_recommendation` reads."""
    return [recommendations.c[column] for column in _COLUMNS.values()]


def _stated(document: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in document.items() if value not in (None, [])}
