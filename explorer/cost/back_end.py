"""The back end of a component: the code that computes its attention and its experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic_core import CoreSchema, core_schema

from bexp.explorer.dimensions.candidate import CHOICES, Candidate
from bexp.explorer.dimensions.dimension import Choice, CodePart
from bexp.explorer.dimensions.execution import COMPILED


class BackEnd(NamedTuple):
    """The code of a component, of any shapes; as text, `sdpa+grouped_mm+liger+compiled`.

    `attention` and `experts` name kernels. `marks` are those of the choices that change the code of a layer. `setting`
    is the loss of a shell, or the choice that the target itself offers for a model that is measured whole.
    """

    attention: str | None = None
    experts: str | None = None
    marks: tuple[str, ...] = ()
    setting: str | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """Write it as text. Its component reads that text, because the meaning depends on the component's kind."""
        return core_schema.no_info_plain_validator_function(
            cls._check,
            serialization=core_schema.to_string_ser_schema(when_used="always"),
            json_schema_input_schema=core_schema.str_schema(),
        )

    @classmethod
    def _check(cls, given: Any) -> BackEnd:
        if not isinstance(given, cls):
            raise ValueError("must be text")  # noqa: TRY004 - a broken rule to pydantic
        return given

    @classmethod
    def of_layer(cls, text: str) -> BackEnd:
        """Return the back end of a layer, which names its attention first."""
        attention, *others = text.split("+")
        experts = [name for name in others if not _is_mark(name)]
        return cls(attention, experts[0] if experts else None, tuple(filter(_is_mark, others)))

    @classmethod
    def of_block(cls, text: str, *, has_experts: bool) -> BackEnd:
        """Return the back end of a reference block, which names its experts or its attention, and the compiler."""
        names = text.split("+")
        own = next((name for name in names if not _is_mark(name)), None)
        kernels = cls(experts=own) if has_experts else cls(attention=own)
        return kernels._replace(marks=tuple(filter(_is_mark, names)))

    @property
    def plain(self) -> BackEnd:
        """The same kernels without the compiler."""
        return self._replace(marks=tuple(mark for mark in self.marks if mark != COMPILED))

    @property
    def compiled(self) -> bool:
        """Whether the compiler makes the code."""
        return COMPILED in self.marks

    @property
    def unmarked(self) -> BackEnd:
        """The same kernels of attention and experts, in the plain code."""
        return self._replace(marks=())

    def __str__(self) -> str:
        """Return the text that recordings contain."""
        return "+".join(filter(None, (self.attention, self.experts, *self.marks, self.setting)))


def marks_of(candidate: Candidate, part: CodePart) -> tuple[str, ...]:
    """Return the marks of a part of a candidate, in the order of the list of choices."""
    return tuple(
        mark
        for choice in CHOICES
        if choice.part is part and (value := getattr(candidate, choice.fields[0])) is not None
        if (mark := choice.mark(value)) is not None
    )


def marked_values(part: CodePart, marks: Iterable[str]) -> Iterator[tuple[Choice[Any], Any]]:
    """Yield each choice that changes a part, with its value in a component of these marks; None for the plain code."""
    known = tuple(marks)
    for choice in CHOICES:
        if choice.part is part:
            yield choice, next((value for mark in known if (value := choice.of_mark(mark)) is not None), None)


def _is_mark(name: str) -> bool:
    return any(value is not None for _, value in marked_values(CodePart.LAYER, (name,)))
