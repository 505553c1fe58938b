"""An answer in lines."""

from __future__ import annotations

from collections.abc import Iterator

from bexp.explorer.answers.rows import AnswerText, Importance, Row, Table
from bexp.explorer.answers.text import WIDTH, row, wrap
from bexp.explorer.model.amounts import rate_text
from bexp.explorer.records.recommendation import Recommendation

BRIEF = {Importance.MAIN, Importance.BRIEF}


def render(text: AnswerText, width: int = WIDTH, *, brief: bool = False) -> str:
    """Return an answer in lines of `width` columns, without a line break at its end: all of it, or only the main rows.

    Lines break between words; only a longer word, or a picture, is wider than `width`.
    """
    rows = [row for row in text.rows if (row.importance in BRIEF if brief else row.importance is not Importance.BRIEF)]
    lines = [text.title, *([""] if rows and not brief else []), *(line for each in rows for line in _lines(each))]
    if text.variants is not None:
        lines += ["", *_table_lines(text.variants)]
    return "\n".join(wrap(lines, width))


def headline(best: Recommendation, target: int | None = None) -> str:
    """Return the figures of a recommended candidate in one line; `target` is the confidence that was asked for."""
    rate, gain = rate_text(best.expected_tokens_per_second, best.rate_unit), best.ratio_text(best.performance)
    of = "out of 100" if target is None else f"(target {target})"
    return f"{rate} per device, {gain} base, confidence {best.confidence} {of}"


def _lines(shown: Row) -> Iterator[str]:
    label = f"  {shown.label}" if shown.label and shown.importance is Importance.PART else shown.label
    first, *others = shown.text.split("\n")
    yield row(label, first) if not others else f"  {label}"
    if others:
        yield from (f"    {line}" for line in (first, *others))


def _table_lines(table: Table) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
    yield table.title
    for cells, note in zip((table.head, *table.rows), ("", *table.notes), strict=True):
        yield "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        if note:
            yield f"      {note}"
