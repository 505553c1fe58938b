from __future__ import annotations

import json
from pathlib import Path

from benchmarks.model_survey import render

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_models_is_current_with_its_data() -> None:
    document = json.loads((DOCS / "models.json").read_text())
    assert (DOCS / "models.md").read_text() == render(document)


def test_at_least_105_types_are_measured_by_parts_and_every_other_has_its_cause() -> None:
    rows = json.loads((DOCS / "models.json").read_text())["models"].values()
    assert sum(row["status"] == "parts" for row in rows) >= 105
    for row in rows:
        if row["status"] == "parts":
            assert {"runs", "layers", "layer_replay", "shell", "sum_of_parts"} <= set(row["features"])
        else:
            assert row.get("reason") or row["failures"]
