"""What the goals of the Trainer's table say about its rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.docs.trainer_goals import checks, goals


def row(model: str, recommended: float | None, *, fields: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """A row whose stock sweep reached 10 tokens/s."""
    ran = {
        "micro_batch_size": 1,
        **({"error": "out of memory"} if recommended is None else {"tokens_per_second": recommended}),
    }
    exploration = {
        "wall_seconds": 60.0,
        "log": ["BEXP203 Whole model: 9 tokens/s; composed step -0.5%, composed peak +1.6%"],
    }
    sweep = [{"micro_batch_size": 1, "tokens_per_second": 10.0}]
    found = {"model": model, "fields": list(fields), "padded": bool(fields), "exploration": exploration}
    return {**found, "recommended": [ran], "sweep": sweep, **more}


def said(rows: list[dict[str, Any]], what: str) -> tuple[str, str]:
    """The words "reached" and "measured" of one goal."""
    line = next(line for line in goals({"models": rows}).splitlines() if line.startswith(f"| {what}"))
    reached, measured = (cell.strip() for cell in line.split("|")[3:5])
    return reached, measured


def test_one_model_in_fourteen_may_be_slower_than_the_sweep() -> None:
    rows = [row(f"model-{i}", 9.9) for i in range(13)]
    assert said([*rows, row("slow", 9.0)], "within 2% of the Trainer's own best, texts") == (
        "yes",
        "13 of 14 models; not slow 0.900x",
    )
    assert said([*rows[:-1], row("slow", 9.0), row("slower", 8.0)], "within 2%")[0] == "no"
    assert said(rows, "within 2%")[0] == "no", "fewer models than the goal asks for"


def test_a_configuration_that_fails_is_counted() -> None:
    assert said([row("good", 10.0), row("bad", None)], "recommended candidates") == ("no", "1 of 2 runs")


def test_padded_rows_have_a_line_of_their_own() -> None:
    rows = [row("model", 10.0), row("model", 5.0, fields=("padding=right",))]
    assert said(rows, "within 2% of the Trainer's own best, padded") == ("no", "0 of 1 models; not model 0.500x")


def test_late_answers_are_named() -> None:
    late = row("late", 10.0)
    late["exploration"]["wall_seconds"] = 121.0
    assert said([row("model", 10.0), late], "submit") == ("no", "median 90 s over 2 models; later: late 121 s")


def test_a_gain_is_also_held_against_compiled_stock() -> None:
    compiled = [{"micro_batch_size": 1, "tokens_per_second": 12.0}]
    rows = [
        row("olmoe-1b", 11.0),
        row("olmoe-1b", 18.0, fields=("execution=explore",), compiled_sweep=compiled, padded=False),
    ]
    assert said(rows, "olmoe-1b after") == ("yes", "1.80x; 1.50x of the Trainer's own `torch_compile`")


def test_errors_are_read_from_the_log() -> None:
    log = ["BEXP203 Runner-up: whole model; composed step -1.0%, composed peak +2.1%", "BEXP401 composed step +9.0%"]
    assert checks(log) == [pytest.approx((0.01, 0.021))]
