"""What the README says of waiting times."""

from __future__ import annotations

import pytest

from benchmarks.docs import waiting
from benchmarks.docs.results import Row


def results(*confident: float | None) -> Row:
    runs = [
        {
            "name": name,
            "submit_to_confidence_90_seconds": seconds,
            "submit_to_final_seconds": 40.0,
            "request": {"verify": not name.endswith("transformers")},
        }
        for name, seconds in [("a", 12.0), *((f"{number}-transformers", each) for number, each in enumerate(confident))]
    ]
    return {"environment": {"date": "2026-11-23T00:00:00"}, "runs": runs}


@pytest.mark.parametrize(
    ("confident", "said"),
    [((8.0, 10.0), "8 to 10 s"), ((8.0, None, 10.0), "8 to 10 s; 1 of 3 never"), ((None,), "never")],
)
def test_runs_that_end_below_the_confidence_are_counted(confident: tuple[float | None, ...], said: str) -> None:
    title = f"the same, {len(confident)} models in transformers' own classes"
    assert dict(waiting.in_short(results(*confident)))[title] == said
