"""What pydantic says of the native shape, in the words of the document that a person wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from explorer.formats.document import Location, Problem
from explorer.spec.options import MAX_MICRO_BATCH_SIZE
from explorer.spec.request import ExplorationRequest
from explorer.spec.training import Sharding

MICRO_BATCH_RULE = (
    "must be 'explore', 'auto', {explore: {min, max}}, a whole number from 1 to "
    f"{MAX_MICRO_BATCH_SIZE}, or a list of such numbers"
)
SIZES = ("context_parallel", "sizes")
SIZES_RULE = "must be 'explore' or a list of 1 to 16 whole numbers from 1 to 4096"

SHARDING = ("training", "sharding")
LEVELS = ("sharding_levels",)
_NAMES = ", ".join(f"'{level}'" for level in Sharding)
SHARDING_RULE = f"must be one of {_NAMES}, a list of them, or 'explore'"
LEVELS_RULE = f"must be a list of {_NAMES}, or 'explore'"


def explain(error: ValidationError, sources: Mapping[Location, Location]) -> list[Problem]:
    """Each objection once, at the field that the document calls it by; `sources` maps native fields to those."""
    problems: dict[Problem, None] = {}
    for detail in error.errors(include_url=False):
        native, message = _simplify(detail)
        problems[relocate(_narrow(native, message), sources), _rename(message, native, sources)] = None
    within = {location[:length] for location, _ in problems for length in range(len(location))}
    return [problem for problem in problems if problem[1] != MICRO_BATCH_RULE or problem[0] not in within]


def relocate(native: Location, sources: Mapping[Location, Location]) -> Location:
    """Where the document has the native field `native`."""
    for length in range(len(native), 0, -1):
        if native[:length] in sources:
            return (*sources[native[:length]], *native[length:])
    return native


def _simplify(detail: ErrorDetails) -> tuple[Location, str]:
    """The field of an error without the names that pydantic gives the members of a union."""
    location: Location = detail["loc"]
    message = detail["msg"].removeprefix("Value error, ")
    if location[:1] == ("num_csx",):
        location = ("num_devices", *location[1:])
    if location[:2] == SIZES:
        return SIZES, SIZES_RULE
    if location == SHARDING:
        return SHARDING, SHARDING_RULE
    if location[:1] == LEVELS:
        return LEVELS, LEVELS_RULE
    if location[:1] != ("micro_batch_size",):
        return location, message
    if location[1:3] == ("ExploreRange", "explore") and detail["type"] != "missing":
        return ("micro_batch_size", *location[2:]), message
    return ("micro_batch_size",), MICRO_BATCH_RULE


def _narrow(native: Location, message: str) -> Location:
    """A rule between fields is reported on their mapping; point at the field that its message begins with."""
    subject = re.match(r"[a-z_]+(\.[a-z_]+)*\b(?! and )", message)
    if subject is None:
        return native
    narrowed: Location = (*native, *subject.group().split("."))
    return narrowed if _is_field(narrowed) else native


def _is_field(location: Location) -> bool:
    owner: type[BaseModel] | None = ExplorationRequest
    for key in location:
        field = owner.model_fields.get(str(key)) if owner is not None else None
        if field is None:
            return False
        types = (field.annotation, *get_args(field.annotation))
        owner = next((kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return True


def _rename(message: str, native: Location, sources: Mapping[Location, Location]) -> str:
    """Say what the fields that a message speaks of are called in the document."""
    names = {
        str(target[-1]): str(source[-1])
        for target, source in sources.items()
        if target[: len(native)] == native and target[-1] != source[-1]
    }
    spoken = [name for name in names if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message)]
    if not spoken:
        return message
    return f"{message} (here {', '.join(f'{names[name]} is {name}' for name in spoken)})"
