"""The fields of a request with their defaults, from the schema that the service validates with."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.docs.results import table
from bexp.explorer.spec.request import ExplorationRequest


def request_fields() -> str:
    """A table for the request and for each object within it."""
    schema = ExplorationRequest.model_json_schema()
    parts = {"A request": schema} | {
        f"`{name}`": part for name, part in schema.get("$defs", {}).items() if part.get("properties")
    }
    return "\n".join(f"### {title}\n\n{_about(part)}{_fields(part)}" for title, part in parts.items())


def _about(part: dict[str, Any]) -> str:
    first = part.get("description", "").strip().split("\n\n")[0].replace("\n", " ")
    return f"{first}\n\n" if first else ""


def _fields(part: dict[str, Any]) -> str:
    required = set(part.get("required", ()))
    columns = {
        "field": lambda item: f"`{item[0]}`",
        "type": lambda item: _type(item[1]),
        "default": lambda item: "required" if item[0] in required else f"`{json.dumps(item[1].get('default'))}`",
        "what": lambda item: " ".join(item[1].get("description", "").split()),
    }
    return table(part["properties"].items(), columns)


def _type(field: dict[str, Any]) -> str:
    """`integer >= 1`, `list of string`, `"a" or "b"`, or the name of another object."""
    if "$ref" in field:
        return f"`{field['$ref'].rsplit('/', 1)[-1]}`"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in field:
            return " or ".join(dict.fromkeys(_type(each) for each in field[several]))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return " ".join([kind, *(f"{sign} {field[name]}" for name, sign in bounds.items() if name in field)])
