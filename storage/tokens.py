"""Bearer tokens of the API. Only digests are stored: a token has 256 random bits, so that a plain hash suffices."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from storage.database import Database
from storage.tables import tokens

MARK = "bexp_"
_PREFIX_LENGTH = len(MARK) + 6
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is listed: `prefix` is the beginning of the secret."""

    name: str
    prefix: str
    created_at: datetime


class TokenExistsError(ValueError):
    """A token of this name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a token named '{name}' exists; revoke it first, or choose another name")
        self.name = name


def create_token(database: Database, name: str) -> str:
    """Create a token and return its secret, which cannot be read again.

    Raises:
        ValueError: `name` is not 1 to 64 letters, digits, dots, underscores or hyphens.
        TokenExistsError: the name is taken.
    """
    if not _NAME.fullmatch(name):
        raise ValueError("a token's name is 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first")
    secret = MARK + secrets.token_urlsafe(32)
    row = {"name": name, "prefix": secret[:_PREFIX_LENGTH], "digest": _digest(secret)}
    try:
        with database.begin() as connection:
            connection.execute(sa.insert(tokens).values(**row, created_at=database.clock()))
    except sa.exc.IntegrityError as error:
        raise TokenExistsError(name) from error
    return secret


def verify_token(database: Database, secret: str) -> str | None:
    """Return the name of the token with this secret, or null."""
    if not secret.startswith(MARK) or not secret.isascii() or not secret.isprintable():
        return None
    digest = _digest(secret)
    query = sa.select(tokens.c.name, tokens.c.digest).where(tokens.c.prefix == secret[:_PREFIX_LENGTH])
    with database.read() as connection:
        rows = connection.execute(query).all()
    return next((row.name for row in rows if hmac.compare_digest(row.digest, digest)), None)


def list_tokens(database: Database) -> list[Token]:
    """Return every token, ordered by name."""
    query = sa.select(tokens.c.name, tokens.c.prefix, tokens.c.created_at).order_by(tokens.c.name)
    with database.read() as connection:
        return [Token(row.name, row.prefix, row.created_at) for row in connection.execute(query)]


def revoke_token(database: Database, name: str) -> bool:
    """Delete a token; false if there is none of this name."""
    with database.begin() as connection:
        return connection.execute(sa.delete(tokens).where(tokens.c.name == name)).rowcount > 0


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
