"""An answer in lines, and a real run compared with it."""

from __future__ import annotations

from collections.abc import Iterator

from bexp.explorer.answers.rows import AnswerText, Importance, Row, Table
from bexp.explorer.answers.text import WIDTH, row, wrap
from bexp.explorer.model.amounts import bytes_text, rate_text
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.explorer.records.run_report import RunReport

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
    rate, gain = rate_text(best.expected_tokens_per_second, best.rate_unit), f"{best.performance:.2f}x"
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


def render_run_report(report: RunReport, best: Recommendation) -> str:
    """Return one line about a real run, compared with `best` if it used one of its two micro-batch sizes."""
    line = (
        f"a run on {report.hardware} reached {rate_text(report.tokens_per_second)} per device with micro_batch_size "
        f"{report.micro_batch_size} in {report.steps:,} steps"
    )
    if report.peak_bytes is not None:
        line += f", peak {bytes_text(report.peak_bytes)}"
    promised = _promised(best, report.micro_batch_size)
    if promised is None:
        return line
    speed = report.tokens_per_second / promised[0]
    peak = ""
    if report.peak_bytes is not None and promised[1]:
        peak = f", {report.peak_bytes / promised[1]:.2f}x the promised peak"
    return f"{line}: {speed:.2f}x the promised speed{peak}"


def _promised(best: Recommendation, micro_batch_size: int) -> tuple[float, int] | None:
    """Return the tokens/s and the peak bytes of the figure with this micro-batch size; None if neither has it."""
    if micro_batch_size == best.candidate.micro_batch_size:
        return best.expected_tokens_per_second, best.expected_peak_bytes
    other = best.alternative(Role.DIVIDING)
    if other is not None and micro_batch_size == other.candidate.micro_batch_size:
        return other.tokens_per_second, other.expected_peak_bytes
    return None
