"""The base of every value that crosses a process or a network boundary, and the error of a broken rule."""

from pydantic import BaseModel, ConfigDict

FieldPath = tuple[str, ...]


class Frozen(BaseModel):
    """An immutable value that takes no unknown keys, no NaN and no infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def is_null(value: object) -> bool:
    """Return whether a field is null, for fields that are stored only if they have a value."""
    return value is None


class RuleError(ValueError):
    """Fields that are each valid contradict each other.

    `fields` holds the paths of the fields that the rule relates, as keys from the value whose validator raised the
    error. The first path is the field at fault. It is empty if the value as a whole is at fault.

    Pydantic keeps the exception in its error details, under `ctx["error"]`.
    """

    def __init__(self, message: str, *fields: str | FieldPath) -> None:
        """A field is a tuple of keys, or dotted text such as `bta.max_tile`."""
        super().__init__(message)
        self.fields = tuple(tuple(field.split(".")) if isinstance(field, str) else field for field in fields)
