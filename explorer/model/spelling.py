"""Suggestions for misspelt names, and texts of others in a message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_NAME = 64
LONGEST_WORD = 128
"""Characters of what may be a name."""
_WORD = re.compile(r"[^\s,;]+")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """Return ` (did you mean 'hidden_size'?)` to add to a message, empty if no known name is like `name`.

    `cutoff` is the least likeness, from 0 to 1.
    """
    similar = get_close_matches(name, list(known), n=1, cutoff=cutoff) if len(name) <= LONGEST_NAME else []
    return f" (did you mean '{similar[0]}'?)" if similar else ""


def shortened(value: object, most: int = 60) -> str:
    """Return a text of somebody else for a message: whole words of it, in about `most` characters.

    A dotted name or a path is one word. A word that is too long ends with one of its parts, or is not shown.
    """
    text = str(value)
    ends = [word.end() for word in _WORD.finditer(text)]
    if len(text) <= most or (ends[-1:] == ends[:1] and len(text) <= LONGEST_WORD):
        return text
    end = max((each for each in ends if each <= most), default=ends[0] if ends else 0)
    if end > LONGEST_WORD and end == ends[0]:
        end = max(text.rfind(mark, 0, LONGEST_WORD) for mark in "./|")
    return f"{text[:end]}..." if end > 0 else f"({len(text):,} characters)"
