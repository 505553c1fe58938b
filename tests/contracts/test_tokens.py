from __future__ import annotations

import pytest
import sqlalchemy as sa

from bexp.storage.database import Database
from bexp.storage.tables import tokens
from bexp.storage.tokens import TokenExistsError, create_token, list_tokens, revoke_token, verify_token


def name_of(database: Database, secret: str) -> str | None:
    token = verify_token(database, secret)
    return None if token is None else token.name


def test_a_token_is_known_until_it_is_revoked(database: Database) -> None:
    secret = create_token(database, "laptop")
    other = create_token(database, "ci")
    assert name_of(database, secret) == "laptop"
    assert name_of(database, other) == "ci"
    assert [token.name for token in list_tokens(database)] == ["ci", "laptop"]
    assert revoke_token(database, "laptop")
    assert verify_token(database, secret) is None
    assert name_of(database, other) == "ci"
    assert not revoke_token(database, "laptop")


def test_the_secret_is_not_stored(database: Database) -> None:
    secret = create_token(database, "laptop")
    with database.read() as connection:
        row = connection.execute(sa.select(tokens)).one()
    assert secret not in str(row)
    assert (len(secret), row.prefix) == (len("bexp_") + 43, secret[:11]), "256 bits in base64, and how they begin"


def test_a_wrong_secret_is_nobody(database: Database) -> None:
    secret = create_token(database, "laptop")
    for ending in ("x", "", "é", "\0", "\ud800", " "):
        wrong = secret[:-1] + ending
        assert verify_token(database, wrong if wrong != secret else wrong[:-1] + "y") is None
        assert verify_token(database, ending) is None


def test_names_are_unique_and_plain(database: Database) -> None:
    create_token(database, "laptop")
    with pytest.raises(TokenExistsError, match="laptop"):
        create_token(database, "laptop")
    for name in ("", "a b", "x" * 65, "-x", "a\n"):
        with pytest.raises(ValueError, match="name"):
            create_token(database, name)
