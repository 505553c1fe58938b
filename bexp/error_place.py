"""The place where an error was raised, for a reason of one line."""

from __future__ import annotations

import traceback
from pathlib import Path

_OWN = Path(__file__).parent


def place_of(error: BaseException) -> str:
    """Return the line that raised, as ` (train.py line 12)`: the last of a person's own code, or else of any code."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if _OWN not in Path(frame.filename).parents]
    outside = [frame for frame in others if "site-packages" not in frame.filename and "<frozen" not in frame.filename]
    last = (outside or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name} line {frame.lineno})" for frame in last)
