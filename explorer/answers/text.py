"""Lines of labelled rows for a person, and the words of some figures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

LABEL_WIDTH = 18
WIDTH = 80
NO_BREAK = "\N{NO-BREAK SPACE}"
FIGURE = re.compile(r"(?<=\d) (?=(?:us|ms|s|B|KiB|MiB|GiB|TiB|(?:tokens|samples|sequences)/s)\b)")


def row(label: str, text: str) -> str:
    """Return a labelled row for `wrap`."""
    return f"  {label:<{LABEL_WIDTH - 1}} \t{text}"


def wrap(lines: Iterable[str], width: int = WIDTH, indent: int = 6) -> list[str]:
    """Break lines between words, but not between a number and its unit. Only a longer word is wider than `width`.

    The text of a row continues next to its label. Other lines continue indented.
    """
    wrapped: list[str] = []
    for line in lines:
        label, tab, text = line.rpartition("\t")
        parts = textwrap.wrap(
            FIGURE.sub(NO_BREAK, text),
            width,
            initial_indent=label,
            subsequent_indent=" " * (len(label) if tab else indent),
            break_long_words=False,
            break_on_hyphens=False,
        )
        wrapped += [part.replace(NO_BREAK, " ") for part in parts] or [label.rstrip()]
    return wrapped


def clock_text(seconds: float) -> str:
    """Return a time as minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def joined(sizes: Iterable[int]) -> str:
    """Return numbers in a row."""
    return " and ".join(map(str, sizes))
