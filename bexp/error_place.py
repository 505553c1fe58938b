"""What an error says and where it was raised, for a reason of one line."""

from __future__ import annotations

import traceback
from pathlib import Path

from bexp.explorer.model.spelling import shortened

_OWN = Path(__file__).parent


def first_line(error: BaseException) -> str:
    """Return the first line that an error says, or the name of its class."""
    lines = str(error).strip().splitlines()
    return shortened(lines[0], 500) if lines else type(error).__name__


def place_of(error: BaseException) -> str:
    """Return the line that raised, as ` (train.py line 12)`: the last of a person's own code, or else of any code."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if _OWN not in Path(frame.filename).parents]
    outside = [frame for frame in others if "site-packages" not in frame.filename and "<frozen" not in frame.filename]
    last = (outside or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name} line {frame.lineno})" for frame in last)
