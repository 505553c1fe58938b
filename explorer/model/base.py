"""The base of every value that crosses a process or a network boundary, and the rules that values break."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

FieldPath = tuple[str, ...]


class Frozen(BaseModel):
    """An immutable value that takes no unknown keys, no NaN and no infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def is_null(value: object) -> bool:
    """Return whether a field is None, for fields that are stored only if they have a value."""
    return value is None


def is_false(value: object) -> bool:
    """Return whether a field is False, for fields that are stored only if they are set."""
    return value is False


def is_zero(value: object) -> bool:
    """Return whether a field is 0, for fields that are stored only if they are not."""
    return value == 0


class RuleError(ValueError):
    """Fields that are each valid contradict each other.

    `fields` holds the paths of the related fields, as keys from the value whose validator raised the error. The first
    path is the field at fault. It is empty if the value as a whole is at fault.

    Pydantic keeps the exception in its error details, under `ctx["error"]`.
    """

    def __init__(self, message: str, *fields: str | FieldPath) -> None:
        """A field is a tuple of keys, or dotted text such as `bta.max_tile`."""
        super().__init__(message)
        self.fields = tuple(tuple(field.split(".")) if isinstance(field, str) else field for field in fields)


_WORDS = (
    ("Value error, ", ""),
    ("Input should be ", "must be "),
    ("a valid tuple", "a list, such as [a, b]"),
    ("Tuple should have", "must have"),
    (" after validation", ""),
    (", unable to parse string as an integer", ""),
    (", unable to parse string as a number", ""),
)
"""Texts of pydantic, and their replacements: the prefix of our own rules is dropped, other texts become plain words."""

_MEMBER = re.compile(r"<\w+\.\w+: ('\w+')>")
"""The text of pydantic for the one member of an enumeration that it admits."""

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
    return _MEMBER.sub(r"\1", message)
