"""Bearer tokens of the API. Only digests are stored: a token has 256 random bits, so that a plain hash suffices."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from bexp.storage.audit import Action, note_action
from bexp.storage.database import Database
from bexp.storage.owners import LOCAL, LOCAL_OWNER, USUAL_SCOPES, Caller, Scope, check_name
from bexp.storage.tables import tokens

MARK = "bexp_"
_PREFIX_LENGTH = len(MARK) + 6
_DURATION = re.compile(r"([0-9]{1,5})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is stored: `prefix` is the beginning of the secret; without `expires_at` it does not expire.

    `has_expired` is by the database's clock when the token was read.
    """

    name: str
    prefix: str
    created_at: datetime
    owner: str
    scopes: frozenset[Scope]
    expires_at: datetime | None
    has_expired: bool


class TokenExistsError(ValueError):
    """A token of this name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a token named '{name}' exists; revoke it first, or choose another name")
        self.name = name


def create_token(
    database: Database,
    name: str,
    *,
    owner: str = LOCAL_OWNER,
    scopes: Collection[Scope] = USUAL_SCOPES,
    lifetime: timedelta | None = None,
    by: Caller = LOCAL,
) -> str:
    """Create a token and return its secret, which cannot be read again.

    Raises:
        ValueError: `name` or `owner` is not a name as `check_name` defines it, or there is no scope.
        TokenExistsError: the name is taken.
    """
    if not scopes:
        raise ValueError("a token needs a scope")
    secret = MARK + secrets.token_urlsafe(32)
    row = {
        "name": check_name("a token's name", name),
        "prefix": secret[:_PREFIX_LENGTH],
        "digest": digest_of(secret),
        "owner": check_name("an owner's name", owner),
        "scopes": " ".join(sorted(scopes)),
        "expires_at": None if lifetime is None else database.clock(lifetime),
    }
    try:
        with database.begin() as connection:
            connection.execute(sa.insert(tokens).values(**row, created_at=database.clock()))
            note_action(database, connection, by, Action.CREATE_TOKEN, name)
    except sa.exc.IntegrityError as error:
        raise TokenExistsError(name) from error
    return secret


def verify_token(database: Database, secret: str) -> Token | None:
    """Return the token with this secret, or None if there is none. It may have expired."""
    if not secret.startswith(MARK) or not secret.isascii() or not secret.isprintable():
        return None
    digest = digest_of(secret)
    query = _select(database).where(tokens.c.prefix == secret[:_PREFIX_LENGTH])
    with database.read() as connection:
        rows = connection.execute(query).all()
    return next((_token_of(row) for row in rows if hmac.compare_digest(row.digest, digest)), None)


def list_tokens(database: Database) -> list[Token]:
    """Return every token, ordered by name."""
    with database.read() as connection:
        return [_token_of(row) for row in connection.execute(_select(database).order_by(tokens.c.name))]


def find_revoked(database: Database, digests: Collection[str]) -> set[str]:
    """Return those of the digests whose token exists no longer or has expired."""
    valid = sa.or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > database.clock())
    with database.read() as connection:
        valid_digests = connection.scalars(sa.select(tokens.c.digest).where(tokens.c.digest.in_(digests), valid))
        return set(digests).difference(valid_digests)


def revoke_token(database: Database, name: str, *, by: Caller = LOCAL) -> bool:
    """Delete a token; false if there is none of this name."""
    with database.begin() as connection:
        if not connection.execute(sa.delete(tokens).where(tokens.c.name == name)).rowcount:
            return False
        note_action(database, connection, by, Action.REVOKE_TOKEN, name)
    return True


def digest_of(secret: str) -> str:
    """Return the stored form of a secret, its digest."""
    return hashlib.sha256(secret.encode()).hexdigest()


def parse_lifetime(text: str) -> timedelta:
    """Return a duration such as `90d`, `12h`, `30m` or `45s`.

    Raises:
        ValueError: it is none, or zero.
    """
    match = _DURATION.fullmatch(text)
    if match is None or not int(match[1]):
        raise ValueError("a lifetime is a whole number and a unit: 90d, 12h, 30m or 45s")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _select(database: Database) -> sa.Select[Any]:
    return sa.select(tokens, (tokens.c.expires_at <= database.clock()).label("has_expired"))


def _token_of(row: sa.Row[Any]) -> Token:
    scopes = frozenset(Scope(name) for name in row.scopes.split())
    return Token(row.name, row.prefix, row.created_at, row.owner, scopes, row.expires_at, bool(row.has_expired))
