"""A dimension of a mesh as a request states it: a number, a list, or `explore`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

Size = Annotated[int, Field(ge=1, le=4096)]
Sizes = Literal["explore"] | Size | Annotated[tuple[Size, ...], Field(min_length=1, max_length=32)]


def named_sizes(asked: Sizes) -> tuple[int, ...] | None:
    """Return the sizes that a request names, ascending; null for `explore`."""
    if asked == "explore":
        return None
    return (asked,) if isinstance(asked, int) else tuple(sorted(set(asked)))


def nearest_sizes(size: int, legal: Iterable[int]) -> tuple[int, ...]:
    """Return the largest legal size below `size` and the smallest above."""
    below = [each for each in legal if each < size]
    above = [each for each in legal if each > size]
    return (*([max(below)] if below else []), *([min(above)] if above else []))
