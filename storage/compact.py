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

CHAINED = 2
"""Deflated with that dictionary and, after it, the text of the value that this one follows."""

dump_json = partial(json.dumps, allow_nan=False, separators=(",", ":"))


def pack(text: str, after: str = "") -> bytes:
    """Return a text in few bytes. NUL and lone surrogates, which PostgreSQL refuses in a text, are kept out.

    `after` is a text that this one resembles, and that `unpack` will be given again.
    """
    plain = text.replace("\0", "").encode("utf-8", "replace")
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_DEFAULT_STRATEGY, _dictionary(after))
    deflated = packer.compress(plain) + packer.flush()
    form = CHAINED if after else DEFLATED
    return bytes([form]) + deflated if len(deflated) < len(plain) else bytes([PLAIN]) + plain


def unpack(stored: bytes | str, after: str = "") -> str:
    """Return what `pack` was given, or the text that an earlier version stored."""
    if isinstance(stored, str):
        return stored
    if stored[:1] in (bytes([DEFLATED]), bytes([CHAINED])):
        dictionary = _dictionary(after if stored[0] == CHAINED else "")
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS, dictionary)
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


class PackedText(CompactText):
    """What `pack` returns for a text. Whoever reads or writes it unpacks and packs."""

    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: D102 - SQLAlchemy's
        return value

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: D102 - SQLAlchemy's
        return value


class PackedJSON(PackedText):
    """What `pack` returns for a JSON document."""

    cache_ok = True
    declaration = "JSON"


def _dictionary(after: str) -> bytes:
    return (_fixed_dictionary() + after.encode("utf-8", "replace"))[-(1 << zlib.MAX_WBITS) :]


@cache
def _fixed_dictionary() -> bytes:
    return Path(__file__).with_name("compact_dictionary.txt").read_bytes()
