"""The rows of an answer, which every place that shows it draws: a terminal, the page, a notebook and an agent."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from bexp.explorer.model.base import Frozen


class Importance(StrEnum):
    """The importance of a row, by which rows are chosen where there is no room for all."""

    MAIN = "main"
    DETAIL = "detail"
    PART = "part"
    BRIEF = "brief"


class Row(Frozen):
    """A statement of an answer."""

    label: str
    text: str = Field(description="Several lines are a picture, whose characters have one width.")
    importance: Importance = Field(
        Importance.DETAIL,
        description="`main`: what a person needs to use the answer. `detail`: the rest. `part`: belongs to the row "
        "above it that is no part. `brief`: stands for the rest where that is not shown.",
    )


def main(label: str, text: str) -> Row:
    """Return a row that a person needs."""
    return Row(label=label, text=text, importance=Importance.MAIN)


def detail(label: str, text: str) -> Row:
    """Return a row for those who want to know all."""
    return Row(label=label, text=text)


def part(label: str, text: str) -> Row:
    """Return a row that belongs to the one above it."""
    return Row(label=label, text=text, importance=Importance.PART)


def brief(label: str, text: str) -> Row:
    """Return a row that stands for those that are not shown."""
    return Row(label=label, text=text, importance=Importance.BRIEF)


class Table(Frozen):
    """Cells below a head. `notes` has a line for each row, which may be empty."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


class AnswerText(Frozen):
    """The text of an answer."""

    title: str
    rows: tuple[Row, ...]
    variants: Table | None = Field(None, description="Separate models in a table; null if there is one model.")
