"""One thing that a candidate chooses, with all that the search, the logs and the request need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate

V = TypeVar("V")
Row = tuple[str, str]
"""A label and a text, as an answer prints them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where candidates would run: what a dimension may look at when it says what is explored by default."""

    target: str
    device_kind: str | None
    """None: not known yet."""
    is_quick: bool
    """Only eager code and the library's own functions are explored."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One thing that a candidate chooses."""

    name: str
    """In logs, in answers, and as Optuna's parameter."""
    fields: tuple[str, ...]
    """Of `Candidate`."""
    asked: str | None = None
    """The field of the request that restricts it; None if none does."""
    label: Callable[[Candidate], str | None]
    """How one line for a person names the value; None where nothing is said of it."""
    row: Callable[[Candidate], Row | None] = field(default=lambda candidate: None)
    """How an answer names the value; None where nothing is said of it."""


@dataclass(frozen=True, kw_only=True)
class Choice(Dimension, Generic[V]):
    """A dimension with few values that have names. A device may be unable to have some of them."""

    values: tuple[V, ...]
    """All there are, in the order in which they are tried. The base has the first that is admitted."""
    plain: V
    """What a person has who chose nothing."""
    explored: Callable[[Place], Sequence[V]]
    """The values explored by default. What changes numerics is never among them."""
    words: Callable[[V], str]
    """What a trainer is asked to do, in words: `the chunked loss`."""


def named(name: str, attribute: str) -> dict[str, Any]:
    """Return label and row of a dimension that is named where it has a value: `loss=chunked`."""

    def value(candidate: Candidate) -> Any:
        return getattr(candidate, attribute)

    return {
        "label": lambda candidate: None if value(candidate) is None else f"{name}={value(candidate)}",
        "row": lambda candidate: None if value(candidate) is None else (name, str(value(candidate))),
    }
