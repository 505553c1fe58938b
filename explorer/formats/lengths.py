"""Files of lengths of texts: one a line, or a histogram in JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from bexp.explorer.model.lengths import LOGNORMAL, compact_histogram, read_count, read_histogram
from bexp.explorer.model.spelling import shortened


def is_distribution(text: str) -> bool:
    """Return whether a text is a distribution by its parameters, and no path."""
    return LOGNORMAL.fullmatch(text.strip()) is not None


def parse_lengths(text: str) -> dict[str, Any]:
    """Return the `lengths` of a request from a file's text.

    The text has one length in tokens a line, or is JSON: a list of lengths, or a mapping of lengths to numbers of
    texts.

    Raises:
        ValueError: the text has no length, or something else than lengths that are whole numbers from 1 on.
    """
    if text.lstrip()[:1] in {"{", "["}:
        counts = _parse_json(text)
    else:
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
        counts = Counter(
            read_count(line, f"{shortened(repr(line))} in line {number}") for number, line in lines if line
        )
    if not counts:
        raise ValueError("it has no lengths: write one length in tokens a line")
    return {"histogram": [list(pair) for pair in compact_histogram(counts)]}


def _parse_json(text: str) -> Counter[int]:
    try:
        lengths = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is neither one length a line nor JSON: {error}") from None
    if isinstance(lengths, dict) and isinstance(lengths.get("histogram"), (dict, list)):
        lengths = lengths["histogram"]
    if isinstance(lengths, list) and not any(isinstance(one, list) for one in lengths):
        return Counter(read_count(one, f"length {place}") for place, one in enumerate(lengths, 1))
    return Counter(dict(read_histogram(lengths)))
