"""Owners, such as teams, for whom requests and commands act, and the scopes that limit these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

LOCAL_OWNER = "local"
"""The owner of what is submitted without a token."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Scope(StrEnum):
    """A right of a token. `admin` allows everything, for every owner."""

    SUBMIT = "submit"
    READ = "read"
    CANCEL = "cancel"
    ADMIN = "admin"


ALL_SCOPES = frozenset(Scope)
USUAL_SCOPES = ALL_SCOPES - {Scope.ADMIN}


@dataclass(frozen=True, slots=True)
class Caller:
    """An owner who acts, and the name of the token if there is one.

    `origin` is the address of a client, or the user and the host of a command that works on the database.
    """

    owner: str
    scopes: frozenset[Scope]
    token: str | None = None
    origin: str | None = None

    def may(self, scope: Scope) -> bool:
        """Return whether the scopes allow `scope`."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    @property
    def sees(self) -> str | None:
        """The owner whose jobs the caller sees; None: those of all owners."""
        return None if Scope.ADMIN in self.scopes else self.owner


LOCAL = Caller(LOCAL_OWNER, ALL_SCOPES)
"""The caller with access to this machine or to the database itself."""


def check_name(what: str, name: str) -> str:
    """Return the name of an owner or of a token.

    Raises:
        ValueError: it is not 1 to 64 letters, digits, dots, underscores or hyphens, a letter or digit first.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} is 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first")
    return name
