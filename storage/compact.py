"""Documents and texts in few bytes: deflated with a dictionary of what most of them contain.

A stored value begins with a byte that says how the rest is to be read. A value of an earlier version has no such byte:
it is the text itself.
"""

from __future__ import annotations

import json
import zlib
from functools import cache, partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

PLAIN = 0
DEFLATED = 1
"""Deflated (RFC 1951) with the dictionary `compact_dictionary.txt`, which therefore never changes."""

dump_json = partial(json.dumps, allow_nan=False, separators=(",", ":"))


def pack(text: str) -> bytes:
    """Return a text in few bytes. NUL and lone surrogates, which PostgreSQL refuses in a text, are kept out."""
    plain = text.replace("\0", "").encode("utf-8", "replace")
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_DEFAULT_STRATEGY, _dictionary())
    deflated = packer.compress(plain) + packer.flush()
    return bytes([DEFLATED]) + deflated if len(deflated) < len(plain) else bytes([PLAIN]) + plain


def unpack(stored: bytes | str) -> str:
    """Return what `pack` was given, or the text that an earlier version stored."""
    if isinstance(stored, str):
        return stored
    if stored[:1] == bytes([DEFLATED]):
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS, _dictionary())
        return (unpacker.decompress(stored[1:]) + unpacker.flush()).decode()
    return (stored[1:] if stored[:1] == bytes([PLAIN]) else stored).decode()


class _Declared(UserDefinedType[Any]):
    """A column of SQLite whose declaration stays that of earlier versions. SQLite stores bytes in any column."""

    cache_ok = True

    def __init__(self, declaration: str) -> None:
        self.declaration = declaration

    def get_col_spec(self, **_: Any) -> str:
        return self.declaration


class CompactText(TypeDecorator[str]):
    """Text of any origin, such as the output of a crashed process."""

    impl = sa.LargeBinary
    cache_ok = True
    declaration = "TEXT"

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:  # noqa: D102 - SQLAlchemy's
        chosen = _Declared(self.declaration) if dialect.name == "sqlite" else sa.LargeBinary()
        return dialect.type_descriptor(chosen)

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> bytes | None:  # noqa: D102 - SQLAlchemy's
        return None if value is None else pack(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: D102 - SQLAlchemy's
        return None if value is None else unpack(value)


class CompactJSON(CompactText):
    """A JSON document."""

    cache_ok = True
    declaration = "JSON"

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> bytes | None:  # noqa: D102 - SQLAlchemy's
        return None if value is None else pack(dump_json(value))

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: D102 - SQLAlchemy's
        return None if value is None else json.loads(unpack(value))


@cache
def _dictionary() -> bytes:
    return Path(__file__).with_name("compact_dictionary.txt").read_bytes()
