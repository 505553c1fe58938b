"""Translates pydantic's errors about native fields into errors about the fields of the user's document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bexp.explorer.dimensions.micro_batch_size import MAX_MICRO_BATCH_SIZE
from bexp.explorer.model.base import MAPPING_RULE, RuleError, rule_of
from bexp.explorer.model.spelling import did_you_mean
from bexp.explorer.model.training import Sharding
from bexp.explorer.model.translation import Location, Problem
from bexp.explorer.request.request import ExplorationRequest

MICRO_BATCH_RULE = (
    "must be 'explore', 'auto', {explore: {min, max}}, a whole number from 1 to "
    f"{MAX_MICRO_BATCH_SIZE}, or a list of such numbers"
)
MOST_SUGGESTIONS = 20
"""The most unknown fields for which a known one is suggested, because that takes time."""
SIZES = ("context_parallel", "sizes")
SIZES_RULE = "must be 'explore' or a list of 1 to 16 whole numbers from 1 to 4096"

SHARDING = ("training", "sharding")
LEVELS = ("sharding_levels",)
_NAMES = ", ".join(f"'{level}'" for level in Sharding)
SHARDING_RULE = f"must be one of {_NAMES}, a list of them, or 'explore'"
LEVELS_RULE = f"must be a list of {_NAMES}, or 'explore'"

_KIND = re.compile(r"(?:literal|tuple|str-enum)\[.*\]|constrained-\w+")
"""Pydantic's names of the members of a union, in the location of an error."""


def explain(
    error: ValidationError, sources: Mapping[Location, Location], limit: int, *, is_hugging_face: bool = False
) -> list[Problem]:
    """Return at most `limit` problems, each once, at the fields of the document; `sources` maps native fields to them.

    With `is_hugging_face` the model is a config.json, and the length of sequences is a field of the request.
    """
    problems: dict[Problem, None] = {}
    any_of: dict[Location, dict[str, None]] = {}
    for index, detail in enumerate(error.errors(include_url=False, include_input=False)):
        native, message = _simplify(detail)
        if detail["type"] == "extra_forbidden" and message == detail["msg"]:
            meant = _suggest(native, is_hugging_face=is_hugging_face) if index < MOST_SUGGESTIONS else ""
            message = f"is not a known field{meant}"
        if message == MAPPING_RULE and (named := _siblings((*native, ""))):
            message = f"must be a mapping of its fields: {', '.join(named)}"
        fields = _related_fields(detail, native)
        location, message = relocate(fields[0], sources), message + _other_names(fields, sources)
        problems[location, message] = None
        if native != detail["loc"] or detail["type"] == "too_short":
            any_of.setdefault(location, {})[message] = None
        if len(problems) == limit:
            break
    within = {location[:length] for location, _ in problems for length in range(len(location))}
    kept: dict[Problem, None] = {}
    for location, message in problems:
        members = any_of.get(location, {})
        if message not in members:
            kept[location, message] = None
        elif location not in within:  # else an item of the list is at fault
            kept[location, _alternatives(members)] = None
    return list(kept)


def _alternatives(messages: Iterable[str]) -> str:
    """Return one message for several about a value that may be one of several kinds."""
    first, *others = messages
    return ", or ".join([first, *(other.removeprefix("must be ") for other in others)])


def _suggest(native: Location, *, is_hugging_face: bool) -> str:
    """Return the suggestion of a known field for an unknown one, empty without a similar one."""
    known = _siblings(native)
    if len(native) > 1:
        return did_you_mean(str(native[-1]), known)
    length = "hf_seq_length" if is_hugging_face else "model.seq_length"
    return did_you_mean(str(native[-1]), (*known, "seq_length")).replace("'seq_length'", f"'{length}'")


def relocate(native: Location, sources: Mapping[Location, Location]) -> Location:
    """Return the location of the native field `native` in the document."""
    for length in range(len(native), 0, -1):
        if native[:length] in sources:
            return (*sources[native[:length]], *native[length:])
    return native


def _simplify(detail: ErrorDetails) -> tuple[Location, str]:
    """Return the field of an error, without the names that pydantic gives the members of a union, and the rule."""
    location: Location = detail["loc"]
    message = rule_of(detail)
    if location[:1] == ("num_csx",):
        location = ("num_devices", *location[1:])
    if location[:2] == SIZES:
        return SIZES, SIZES_RULE
    if location == SHARDING:
        return SHARDING, SHARDING_RULE
    if location[:1] == LEVELS:
        return LEVELS, LEVELS_RULE
    if location[:1] != ("micro_batch_size",):
        return tuple(part for part in location if not _KIND.fullmatch(str(part))), message
    if location[1:3] == ("ExploreRange", "explore") and detail["type"] != "missing":
        return ("micro_batch_size", *location[2:]), message
    return ("micro_batch_size",), MICRO_BATCH_RULE


def _related_fields(detail: ErrorDetails, native: Location) -> Sequence[Location]:
    """Return the fields that a broken rule relates, the one at fault first; `native` alone for a rule of one field."""
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, RuleError) and error.fields:
        return [(*native, *field) for field in error.fields]
    return [native]


def _other_names(fields: Sequence[Location], sources: Mapping[Location, Location]) -> str:
    """Return an addition to a message: the document's names of those fields that have other names in it."""
    names = {str(sources[field][-1]): str(field[-1]) for field in fields if sources.get(field)}
    renamed = [f"{name} is {native}" for name, native in names.items() if name != native]
    return f" (here {', '.join(renamed)})" if renamed else ""


def _siblings(location: Location) -> tuple[str, ...]:
    """Return the fields of the part of a request that `location` is in; none if that part has no fields of its own."""
    model: type[BaseModel] = ExplorationRequest
    for key in location[:-1]:
        field = model.model_fields.get(str(key))
        inner = None if field is None else _model_in(field.annotation)
        if inner is None:
            return ()
        model = inner
    return tuple(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model that a field holds, which may be one of several types; None if it holds none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)
