"""Processes whose modules have another text than the product's: for failpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "interposed"

Change = tuple[str, str, str]
"""A module, a text that its source has once, and the text in its place."""


def environment_with(changes: Sequence[Change], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process, and of its children, whose modules are changed as they are imported."""
    if not changes:
        return dict(environment)
    path = os.pathsep.join([str(FOLDER), *filter(None, [environment.get("PYTHONPATH")])])
    return {**environment, "PYTHONPATH": path, "CHAOS_CHANGES": json.dumps(changes)}
