"""What the texts of options stand for in a request."""

from __future__ import annotations

from typing import Any

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.explorer.formats.document import FormatError, read_field


def parse_micro_batch_size(text: str | None) -> Any:
    """Return the field of a request that `--micro-batch-size` stands for."""
    if text is None or text in {"explore", "auto"}:
        return text
    if "," in text and all(part.strip().isdecimal() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    low, dash, high = text.partition("-")
    if low.isdecimal() and not dash:
        return int(low)
    if low.isdecimal() and high.isdecimal():
        return {"explore": {"min": int(low), "max": int(high)}}
    raise CommandError(
        ExitCode.USAGE,
        f"--micro-batch-size {text!r} is neither explore, auto, MIN-MAX, a number, nor a list such as 2,4,8",
    )


def parse_fields(assignments: list[str] | None) -> dict[str, Any]:
    """Return the fields that `--set` names, their values read as YAML.

    Raises CommandError for text without "=" or without a value, and FormatError for a value that is no YAML.
    """
    try:
        return dict(map(read_field, assignments or ()))
    except FormatError:
        raise
    except ValueError as error:
        hint = "FIELD=null stands for no value, FIELD='\"\"' for an empty text"
        raise CommandError(ExitCode.USAGE, f"--set {error}", hint) from None
