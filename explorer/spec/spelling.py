"""A known name for one that is misspelt."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_NAME = 64


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """Return ` (did you mean 'hidden_size'?)` to add to a message, or nothing if no known name is like `name`.

    `cutoff` is the least likeness, from 0 to 1.
    """
    similar = get_close_matches(name, list(known), n=1, cutoff=cutoff) if len(name) <= LONGEST_NAME else []
    return f" (did you mean '{similar[0]}'?)" if similar else ""
