"""A dimension:

one thing that a candidate chooses, with all that the search, the logs and the request need to know of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bexp.explorer.dimensions.place import EmptySpaceError, Place, ReportedPlace, usable_backends

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate

V = TypeVar("V", bound=str)
Row = tuple[str, str]
"""A label and a text, as an answer prints them."""
Point = Mapping[str, Any]
"""Fields of a candidate, by name."""
Column = Callable[[Point], Iterable[Point]]
"""The fields of a dimension that candidates may have, in order, where fields of other dimensions are known already."""


class CodePart(StrEnum):
    """The part of a model's own code that a value changes. Only its components are measured anew for that value."""

    LAYER = "layer"
    SHELL = "shell"


@dataclass(frozen=True, slots=True)
class Change:
    """Fields of a request that are changed together, and the change in words."""

    words: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that a run may ask of its trainer."""

    words: Callable[[Any, Hashable], str]
    """Returns the words for a value; the second argument is the part that the trainer cannot express."""
    asks: Callable[[Any], Iterable[Hashable]] = lambda value: (value,)
    """Returns the parts that a trainer has to express for a value."""
    usual: frozenset[Hashable] = frozenset()
    """The parts that a trainer can express if it lists nothing for this term."""


def present(word: str) -> Callable[[Any], Iterable[Hashable]]:
    """Return a function that asks for `word` unless a value is None."""
    return lambda value: () if value is None else (word,)


def unless_null(value: Any) -> Iterable[Hashable]:
    """Ask for a value; None is left to the trainer."""
    return () if value is None else (value,)


@dataclass(frozen=True, kw_only=True)
class Dimension(ABC):
    """One thing that a candidate chooses."""

    name: str
    """In logs, in answers, and as Optuna's parameter."""
    fields: tuple[str, ...]
    """Of `Candidate`."""
    asked: str | None = None
    """The field of the request that restricts it; None if none does."""
    needs: tuple[str, ...] = ()
    """The dimensions that come later in the list, and that `column` must know."""
    label: Callable[[Candidate], str | None]
    """How one line for a person names the value; None where nothing is said of it."""
    row: Callable[[Candidate], Row | None] = field(default=lambda candidate: None)
    """How an answer names the value; None where nothing is said of it."""
    term: Term | None
    """The term of a trainer for it; None if every trainer can express it, or if it is the target's own."""
    least: Change | None = None
    """Its part of a request that needs as little memory as it can."""

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> Any:
        """Return the value that a candidate asks of its trainer."""
        return getattr(candidate, self.fields[0])

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield the values that a request names and that a trainer may be unable to express, each with its field."""
        return ()

    def check(self, place: Place) -> None:  # noqa: B027  # a dimension may have no rule
        """Raise RuleError if the request contradicts itself in this dimension.

        The dimensions that come later in the list were checked before, so their rules hold.
        """

    @abstractmethod
    def column(self, place: ReportedPlace) -> Column:
        """Return the values that candidates may have; the dimensions that come earlier in the list are known then.

        Raises:
            EmptySpaceError: there is none.
        """

    def bases(self, place: ReportedPlace) -> Column:
        """Return the values that the base (1.00x) may have, in order of preference: the first one, unless overridden.

        The dimensions that come later in the list are known then.
        """
        column = self.column(place)
        return lambda known: list(column(known))[:1]

    def unspent(self, place: Place) -> Point:
        """Return the fields of a candidate that spends no time to save memory; none where the request names values."""
        return {}

    def compared(self, place: Place) -> Mapping[str, Any]:
        """Return changes to a request whose candidates an answer compares with, and never recommends;

        an empty one for none.
        """
        return {}

    def relaxations(self, place: ReportedPlace) -> Iterable[Change]:
        """Yield changes to a request for which nothing fits, the nearest first; one may leave a candidate that fits."""
        return ()

    def freed(self, place: Place) -> Change | None:
        """Return the change that lifts what the request names here, which may forbid every change that helps."""
        return None


def column_of(field: str, values: Iterable[Any]) -> Column:
    """Return a column of values of one field that depend on no other."""
    cells = [{field: value} for value in values]
    return lambda known: cells


@dataclass(frozen=True, kw_only=True)
class Choice(Dimension, Generic[V]):
    """A dimension with few values that have names, some of which a device may be unable to have."""

    values: tuple[V, ...]
    """All there are, in the order in which they are tried. The base has the first that is admitted."""
    plain: V
    """The values of a person who chose nothing."""
    explored: Callable[[Place], Sequence[V]]
    """The values explored by default. What changes numerics is never among them."""
    words: Callable[[V], str]
    """The term of a trainer for a value, in words: `the chunked loss`."""
    term: Term | None = None
    """By default, that of its values: a trainer that says nothing of it has the plain one."""
    part: CodePart
    """The part of a model's own code that the value changes."""
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
    stated: Callable[[Place], V | None] = lambda place: None
    """The value that the request states for all candidates."""
    decides_support: bool = False
    """Whether a whole model that is unsupported rules out all candidates that share it and the other such values."""

    def __post_init__(self) -> None:
        """Fill in the term."""
        if self.term is None:
            words = self.words
            object.__setattr__(self, "term", Term(lambda value, _: words(value), unless_null, frozenset({self.plain})))

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield the values that a request names, or those that it leaves to the search: an answer has one of them."""
        field = self.name if self.asked is None or self.named(place.asked) is None else self.asked
        return ((field, value) for value in self.considered(place))

    def named(self, asked: Any) -> tuple[V, ...] | None:
        """Return the values that a request names; None if it leaves them to the search."""
        assert self.asked is not None
        found: tuple[V, ...] | None = getattr(asked, self.asked)
        return found

    def considered(self, place: Place) -> tuple[V, ...]:
        """Return the values to consider before the device is asked, in the order in which they are tried.

        They are those that the request names, or the one that it states for all candidates. Otherwise they are those
        that are explored by default and that the trainer can express.
        """
        wanted: Collection[V] | None = self.named(place.asked)
        if wanted is None and (stated := self.stated(place)) is not None:
            wanted = (stated,)
        if wanted is None:
            able = place.expressible.get(self.name, self.values)
            wanted = [value for value in self.explored(place) if value in able]
        return tuple(value for value in self.values if value in wanted)

    def column(self, place: ReportedPlace) -> Column:
        """Return the values that the device can have: None alone where there is nothing to choose.

        Where the request names no value, only what the device has reported is explored.
        """
        if self.part is CodePart.SHELL and not place.model.computes_losses:
            return column_of(self.fields[0], (None,))
        considered, named = self.considered(place), self.named(place.asked)
        supports = place.report.choices.get(self.name, ())
        is_unheard_of = self.settings is None or any(self.is_tried(value) for value in named or ())
        if not supports and is_unheard_of and named not in (None, (self.plain,)):
            names = " or ".join(map(repr, map(str, named)))
            raise EmptySpaceError(f"{self.name} {names} cannot be set {place.model.place}")
        left = considered if named is not None else considered[:1]
        if supports:
            reported = {support.name for support in supports}
            asked: list[Any] = [value for value in considered if named is not None or value in reported]
            usable = usable_backends(self.name, supports, asked, place.model.place)
            left = tuple(value for value in considered if value in usable)
        return column_of(self.fields[0], self.written(place.asked, left))

    def written(self, asked: Any, values: tuple[V, ...]) -> tuple[V | None, ...]:
        """Return these values as candidates have them: None alone where nothing is chosen."""
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
    """Return the label and the row of a dimension that is named where it has a value: `loss=chunked`."""

    def value(candidate: Candidate) -> Any:
        return getattr(candidate, attribute)

    return {
        "label": lambda candidate: None if value(candidate) is None else f"{name}={value(candidate)}",
        "row": lambda candidate: None if value(candidate) is None else (name, str(value(candidate))),
    }


def marked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mark` and `of_mark` of a choice whose values have these marks; other values have none."""
    return {"mark": {value: mark for mark, value in values.items()}.get, "of_mark": values.get}
