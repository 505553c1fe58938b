"""Packages that are no part of the core, and plug into it: each room asks those of the list for its part."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, Union, cast

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema

EXTENSIONS = ("bexp.explorer.meshes",)


class Extension(Protocol):
    """What all rooms know of such a package; `request.extensions` and `search.extensions` have what they ask it."""

    def record_types(self) -> tuple[type[BaseModel], ...]:
        """Return what the package stores: subclasses of values of the core."""


def extensions() -> tuple[Extension, ...]:
    """Return the packages of the list."""
    return tuple(cast(Extension, import_module(name)) for name in EXTENSIONS)


@dataclass(frozen=True, slots=True)
class Extended:
    """Marks a field whose values are of a subclass that an extension defines."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the subclasses of `source`, or its own if no extension has any."""
        kinds = tuple(kind for one in extensions() for kind in one.record_types() if issubclass(kind, source))
        return handler.generate_schema(Union[kinds]) if kinds else handler(source)  # noqa: UP007 - made when it is run
