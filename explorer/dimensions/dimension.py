"""One thing that a candidate chooses, with all that the search, the logs and the request need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate

V = TypeVar("V")
Row = tuple[str, str]
"""A label and a text, as an answer prints them."""


class CodePart(StrEnum):
    """What of a model's own code a value changes: only the components of that part are measured for it anew."""

    LAYER = "layer"
    SHELL = "shell"


@dataclass(frozen=True, slots=True)
class Place:
    """Where candidates would run: what a dimension may look at when it says what is explored by default."""

    target: str
    device_kind: str | None = None
    """None: not known yet."""
    is_quick: bool = False
    """Only eager code and the library's own functions are explored."""
    is_eager: bool = False
    """Code runs operation by operation: lengths differ, or devices compute a micro-step together."""
    replays: bool = False
    """A micro-step may be replayed as CUDA graphs: training on one device that drops no tokens."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """The value that the request states for all candidates, by dimension."""
    expressible: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """The values that the trainer can express, by dimension; all where none are named."""


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
    part: CodePart
    """What of a model's own code the value changes."""
    mark: Callable[[V], str | None]
    """How a component's text names the value; None where it is the same code as the plain one's."""
    of_mark: Callable[[str], V | None]
    """The value of a mark, as a component's set-up has it; None for another dimension's."""
    settings: Callable[[V], Mapping[str, Any]] | None = None
    """The fields of `bexp.transformers.settings.Settings` that it has; None: the module of its name sets it up."""
    is_tried: Callable[[V], bool] = lambda value: True
    """Whether it is tried on the model before the search: a package may be missing, or not know the model."""
    is_written: bool = False
    """A candidate names its value even where there is no choice."""

    def named(self, asked: Any) -> tuple[V, ...] | None:
        """Return the values that a request names; None if it leaves them to the search."""
        assert self.asked is not None
        found: tuple[V, ...] | None = getattr(asked, self.asked)
        return found

    def considered(self, asked: Any, place: Place) -> tuple[V, ...]:
        """Return the values to consider before the device is asked, in the order in which they are tried.

        They are those that the request names, the one that it states for all candidates, or those that are explored by
        default and that the trainer can express.
        """
        wanted: Collection[V] | None = self.named(asked)
        if wanted is None and place.stated.get(self.name) is not None:
            wanted = (place.stated[self.name],)
        if wanted is None:
            able = place.expressible.get(self.name, self.values)
            wanted = [value for value in self.explored(place) if value in able]
        return tuple(value for value in self.values if value in wanted)

    def written(self, asked: Any, values: tuple[V, ...]) -> tuple[V | None, ...]:
        """Return what candidates have for these values: None alone where nothing is chosen."""
        is_chosen = len(values) != 1 or self.named(asked) not in (None, (self.plain,))
        return values if self.is_written or is_chosen else (None,)

    def read(self, text: object) -> V:
        """Return the value of a name, such as JSON has it. Raises ValueError if there is none."""
        found = next((value for value in self.values if value == text), None)
        if found is None:
            names = " or ".join(", ".join(f"'{value}'" for value in self.values).rsplit(", ", 1))
            raise ValueError(f"the {self.name} is {names}, not '{text}'")
        return found


def named(name: str, attribute: str) -> dict[str, Any]:
    """Return label and row of a dimension that is named where it has a value: `loss=chunked`."""

    def value(candidate: Candidate) -> Any:
        return getattr(candidate, attribute)

    return {
        "label": lambda candidate: None if value(candidate) is None else f"{name}={value(candidate)}",
        "row": lambda candidate: None if value(candidate) is None else (name, str(value(candidate))),
    }


def marked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mark` and `of_mark` of a choice whose values have these marks; other values have none."""
    return {"mark": {value: mark for mark, value in values.items()}.get, "of_mark": values.get}
