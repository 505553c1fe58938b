"""Labels: short texts by which people find explorations again."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

MAX_LABELS = 16
MAX_KEY, MAX_VALUE = 63, 128

_KEY = re.compile(rf"[A-Za-z0-9](?:[A-Za-z0-9._/-]{{0,{MAX_KEY - 2}}}[A-Za-z0-9])?")


def check_key(key: str) -> str:
    """Return the key of a label. Raises ValueError if it is not one."""
    if _KEY.fullmatch(key) is None:
        raise ValueError(
            f"a label's key has 1 to {MAX_KEY} letters, digits, '.', '_', '/' and '-', and begins and ends with a "
            "letter or digit"
        )
    return key


def check_value(value: str) -> str:
    """Return the value of a label. Raises ValueError if it is not one."""
    if not 1 <= len(value) <= MAX_VALUE or not value.isprintable() or value != value.strip():
        raise ValueError(f"a label's value has 1 to {MAX_VALUE} printable characters and no space at its ends")
    return value


def parse_label(text: str) -> tuple[str, str]:
    """Return the key and the value of a label that is written as `key=value`. Raises ValueError if it is not one."""
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError("a label is written as key=value")
    return check_key(key), check_value(value)


Labels = Annotated[
    dict[Annotated[str, AfterValidator(check_key)], Annotated[str, AfterValidator(check_value)]],
    Field(max_length=MAX_LABELS),
]
