"""The rules of models as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WORDS = (
    ("Value error, ", ""),
    ("Input should be ", "must be "),
    ("a valid tuple", "a list"),
    (", unable to parse string as an integer", ""),
    (", unable to parse string as a number", ""),
)
"""What pydantic writes, and what stands for it: a prefix of our own rules, and words that a person reads at once."""

MAPPING_RULE = "must be a mapping of field names to values"
_MAPPINGS = ("model_type", "model_attributes_type", "dict_type")
"""Pydantic's types of error for a value that is no mapping."""


def rule_of(detail: Mapping[str, Any]) -> str:
    """Return the rule that an error of pydantic names, in the words of our own rules."""
    message: str = detail["msg"]
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] in _MAPPINGS:
        return MAPPING_RULE
    for written, plain in _WORDS:
        message = message.replace(written, plain, 1)
    return message
