"""Small recorded runs, and the cells of the tables that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "recorded"


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def cells(text: str, label: str) -> list[list[str]]:
    """The cells of each table row that begins with this label."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line[1:] for line in lines if line[0] == label]


def goal(rows: Any, what: str) -> tuple[bool, str]:
    """Whether the one goal that begins like this was reached, and what was measured."""
    ((_, _, met, text),) = (row for row in rows if row[0].startswith(what))
    return met, text
