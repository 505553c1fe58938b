from __future__ import annotations

import time
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from bexp.api.examples import REQUEST
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database
from bexp.storage.owners import Scope
from bexp.storage.tokens import create_token, revoke_token
from tests.api.problems import assert_problem
from tests.api.serving import in_process


def test_every_route_but_health_asks_for_a_token(guarded: TestClient) -> None:
    paths = guarded.get("/openapi.json").json()["paths"]
    routes = {(method.upper(), path) for path, item in paths.items() for method in item}
    assert len(routes) > 20
    for method, path in routes - {("GET", "/healthz"), ("GET", "/readyz")}:
        response = guarded.request(method, path.replace("{exploration_id}", "0"))
        assert_problem(response, 401)
        assert response.headers["WWW-Authenticate"] == "Bearer"


def test_health_is_open(guarded: TestClient) -> None:
    assert guarded.get("/healthz").status_code == 200
    assert guarded.get("/readyz").status_code == 200


def test_a_token_opens_until_it_is_revoked(
    guarded: TestClient, sqlite_database: Database, settings: ServiceSettings
) -> None:
    secret = create_token(sqlite_database, "ci")
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {secret}"}
        assert guarded.post("/v1/explorations", json=REQUEST, headers=headers).status_code == 202
    revoke_token(sqlite_database, "ci")
    time.sleep(settings.token_check_seconds)
    response = guarded.get("/v1/explorations", headers=headers)
    assert_problem(response, 401)
    assert "invalid_token" in response.headers["WWW-Authenticate"]


@pytest.mark.parametrize("value", ["", "Bearer ", "Basic YTpi", "Bearer x", "Bearer bexp_x", b"Bearer bexp_\xff"])
def test_what_is_no_token_is_refused(guarded: TestClient, sqlite_database: Database, value: str | bytes) -> None:
    create_token(sqlite_database, "ci")
    header = value.encode() if isinstance(value, str) else value
    assert_problem(guarded.get("/v1/explorations", headers=[(b"Authorization", header)]), 401)


def test_a_refused_body_is_not_read(guarded: TestClient) -> None:
    response = guarded.post("/v1/explorations", content=b"{" * 300_000, headers={"Content-Type": "application/json"})
    assert_problem(response, 401)


@pytest.mark.parametrize("host", ["localhost:8642", "127.0.0.1", "[::1]:8642", "127.1.2.3"])
def test_without_tokens_loopback_names_are_served(client: TestClient, host: str) -> None:
    assert client.get("/v1/explorations", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "", "[::1", "127.0.0.1.nip.io"])
def test_without_tokens_a_foreign_name_is_refused(client: TestClient, host: str) -> None:
    assert_problem(client.get("/v1/explorations", headers={"Host": host}), 403)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_token_that_is_not_required_counts_all_the_same(
    settings: ServiceSettings, sqlite_database: Database, is_open: bool
) -> None:
    """The service's own user may run a program that passes on the requests of others, with their tokens."""
    reader = {"Authorization": f"Bearer {create_token(sqlite_database, 'reader', owner='team', scopes={Scope.READ})}"}
    with in_process(replace(settings, is_open=is_open)) as client:
        own = client.post("/v1/explorations", json=REQUEST).json()["id"]
        assert client.get(f"/v1/explorations/{own}").status_code == 200
        assert_problem(client.get("/v1/explorations", headers={"Authorization": "Bearer bexp_wrong"}), 401)
        assert client.get("/v1/explorations", headers=reader).json()["items"] == []
        assert_problem(client.post("/v1/explorations", json=REQUEST, headers=reader), 403)


def test_without_tokens_other_origins_are_refused(client: TestClient) -> None:
    for origin in ("https://evil.example", "null", "file://", "http://localhost:3000", "https://localhost:8642", ""):
        headers = {"Origin": origin, "Host": "localhost:8642"}
        assert_problem(client.post("/v1/explorations", json=REQUEST, headers=headers), 403)
    own = {"Origin": "http://LOCALHOST:8642", "Host": "localhost:8642"}
    assert client.post("/v1/explorations", json=REQUEST, headers=own).status_code == 202
