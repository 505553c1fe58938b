"""The raw results, and what every section says of where they come from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from explorer.spec.hardware import HardwareSpec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def exists(name: str) -> bool:
    """Whether a run of this name has been recorded."""
    return (RESULTS / f"{name}.json").exists()


def load(name: str) -> dict[str, Any]:
    """A recorded run."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def measured_on(results: dict[str, Any]) -> str:
    """The device, the versions, the day, and in how many runs if it was continued."""
    environment = results["environment"]
    if "hardware" in results:
        device = HardwareSpec.model_validate(results["hardware"]).describe()
    else:
        device = f"{results['device']}, torch {environment['packages']['torch']}"
    days = dict.fromkeys(date[:10] for date in (environment["date"], *results.get("continued", ())))
    runs = f", in {1 + len(results['continued'])} runs" if results.get("continued") else ""
    return f"Measured on {device}, {' and '.join(days)}{runs}."


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    head = list(header)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def left_out(count: int, what: str) -> str:
    """A sentence if there was no time for everything."""
    return f" For want of time {count} {what} were left out." if count else ""
