"""The rules of models as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX = "Value error, "


def rule_of(detail: Mapping[str, Any]) -> str:
    """Return the rule that an error of pydantic names, without its prefix of our own rules and its name for a list."""
    message: str = detail["msg"]
    return message.removeprefix(_PREFIX).replace("a valid tuple", "a list")
