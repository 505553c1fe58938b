"""Values of settings as text, and where they stand in braces in a command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def text_of(value: Any) -> str:
    """Return a value as a command or a file of settings takes it: `true`, `8`, `adafactor`."""
    return value if isinstance(value, str) else json.dumps(value)


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Return a value of each setting in one line, by which the search knows them."""
    return " ".join(f"{name}={text_of(value)}" for name, value in choice.items())


def stands_in(name: str, arguments: Sequence[str]) -> bool:
    """Whether a setting stands in braces in a command."""
    return any(f"{{{name}}}" in argument for argument in arguments)


def fill(arguments: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the arguments with values in place of their names in braces."""
    filled = list(arguments)
    for name, value in values.items():
        filled = [argument.replace(f"{{{name}}}", text_of(value)) for argument in filled]
    return filled
