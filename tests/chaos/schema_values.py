"""Values that a JSON schema allows."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

MAX_DEPTH = 4
TEXTS = ("auto", "bexp", "adamw", "a", "team", "2026-01-15T19:39:12Z")


class Schemas:
    """Draws values of the schemas of an OpenAPI document. They break rules between fields, and patterns of texts."""

    def __init__(self, document: Mapping[str, Any], rng: Random) -> None:
        self._definitions = document["components"]["schemas"]
        self._rng = rng

    def draw(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Return a value of a schema."""
        rng, schema = self._rng, self._resolve(schema)
        for known in ("enum", "examples"):
            if known in schema:
                return rng.choice(schema[known])
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "boolean":
                return rng.random() < 0.5
            case "integer":
                return rng.choice(_integers(schema))
            case "number":
                least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
                most = schema.get("maximum", schema.get("exclusiveMaximum", least + 10))
                return rng.choice((least, most, least + rng.random() * min(10, most - least)))
            case "string":
                return rng.choice(TEXTS)
            case "array":
                return [self.draw(schema.get("items", {}), depth + 1) for _ in range(rng.choice((1, 1, 2, 5)))]
            case "object" if depth < MAX_DEPTH:
                known = schema.get("properties", {})
                names = [name for name in known if name in schema.get("required", ()) or rng.random() < 0.3]
                return {name: self.draw(known[name], depth + 1) for name in names}
        return None

    def draw_field(self, name: str) -> tuple[list[str], Any]:
        """Return the path of a field of a schema, and a value that it may have."""
        path: list[str] = []
        schema = self._resolve({"$ref": f"#/components/schemas/{name}"})
        while fields := schema.get("properties"):
            path.append(self._rng.choice(sorted(fields)))
            schema = self._resolve(fields[path[-1]])
            if self._rng.random() < 0.3:
                break
        return path, self.draw(schema, len(path))

    def _resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema or "anyOf" in schema or "oneOf" in schema:
            if "$ref" in schema:
                schema = self._definitions[schema["$ref"].rsplit("/", 1)[-1]]
            else:
                schema = self._rng.choice(schema.get("anyOf") or schema["oneOf"])
        return schema


def _integers(schema: Mapping[str, Any]) -> list[int]:
    least = int(schema.get("minimum", 0))
    most = int(schema.get("maximum", least + 1000))
    return [least, most, min(most, least + 1), min(most, least + 7)]
