"""Writes docs/request.md: the fields of a request with their defaults, from the schema that the service validates with.

python -m benchmarks.request_page
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.environment import ROOT
from bexp.explorer.request.request import ExplorationRequest

SCHEMA = ExplorationRequest.model_json_schema()
PAGE = ROOT / "docs" / "request.md"
ABOUT = """# All fields of a request

Written by `python -m benchmarks.request_page` from the schema that the service validates with, which `GET /v1/schema`
returns. [Configuration](configuration.md) explains the fields. A field without a stated default may be left out: it is
null then, or has the defaults of its object below.
"""
SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def main() -> int:
    PAGE.write_text(render())
    return 0


def render() -> str:
    """Return the page: the request, then each object within it."""
    parts = {"A request": SCHEMA, **{f"`{name}`": part for name, part in SCHEMA["$defs"].items()}}
    return "\n".join([ABOUT, *(_section(title, part) for title, part in parts.items() if part.get("properties"))])


def _section(title: str, part: dict[str, Any]) -> str:
    about = " ".join(part.get("description", "").split("\n\n")[0].split())
    lines = [_line(name, field, name in part.get("required", ())) for name, field in part["properties"].items()]
    return f"## {title}\n\n{about}\n\n" + "".join(lines)


def _line(name: str, field: dict[str, Any], required: bool) -> str:
    what = " ".join(field.get("description", "").split())
    default = field.get("default")
    requirement = "; required" if required else ""
    if default is not None and not isinstance(default, dict):
        requirement = f"; default `{json.dumps(default)}`"
    return f"- `{name}` ({_type(field)}{requirement}){f': {what}' if what else ''}\n"


def _type(field: dict[str, Any]) -> str:
    """Return `integer >= 1`, `list of string`, `a, b`, or the name of another object."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return _type(SCHEMA["$defs"][name]) if "enum" in SCHEMA["$defs"][name] else f"`{name}`"
    several = next((field[key] for key in ("anyOf", "oneOf", "allOf") if key in field), None)
    if several is not None:
        return " or ".join(dict.fromkeys(_type(each) for each in several if each.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    bounds = [f"{sign} {field[name]}" for name, sign in SIGNS.items() if name in field and field[name] < 1e6]
    return " ".join([str(field.get("type", "any")), *bounds])


if __name__ == "__main__":
    sys.exit(main())
