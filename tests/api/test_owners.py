"""What a token may do, for whom, and how often; and whom a service serves without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from bexp.api import tokens as api_tokens
from bexp.api.app import create_app
from bexp.api.examples import REQUEST
from bexp.api.rate_limits import BURST_SECONDS, MAX_KEYS, RateLimiter, address_key
from bexp.api.settings import ServiceSettings
from bexp.storage.audit import read_audit
from bexp.storage.database import Database
from bexp.storage.jobs import Job, JobState
from bexp.storage.owners import ALL_SCOPES, USUAL_SCOPES, Scope
from bexp.storage.queue import Queue
from bexp.storage.quotas import Quota, set_quota
from bexp.storage.tables import tokens
from bexp.storage.tokens import create_token, revoke_token, verify_token
from tests.api.problems import assert_problem
from tests.api.serving import Served, in_process
from tests.contracts.samples import make_progress, make_worker
from tests.waits import PATIENCE_SECONDS, wait_until

HERE = "/v1/explorations"


def header(
    database: Database, name: str, *scopes: Scope, owner: str = "team-a", lifetime: timedelta | None = None
) -> dict[str, str]:
    """Create a token and return the header that carries it."""
    secret = create_token(database, name, owner=owner, scopes=scopes or USUAL_SCOPES, lifetime=lifetime)
    return {"Authorization": f"Bearer {secret}"}


def needed_scope(method: str, path: str) -> Scope | None:
    if path == "/v1/schema":
        return None
    if path in {"/v1/audit", "/v1/quotas", "/v1/owners/{owner}/quota"}:
        return Scope.ADMIN
    if method == "get":
        return Scope.READ
    return Scope.CANCEL if method == "delete" or path.endswith("/cancel") else Scope.SUBMIT


def test_every_route_needs_a_scope(guarded: TestClient, sqlite_database: Database) -> None:
    others = {scope: header(sqlite_database, f"not-{scope}", *(USUAL_SCOPES - {scope})) for scope in sorted(ALL_SCOPES)}
    refused = 0
    for path, item in guarded.get("/openapi.json").json()["paths"].items():
        for method in item:
            scope = needed_scope(method, path)
            if path in {"/healthz", "/readyz"} or scope is None:
                continue
            response = guarded.request(
                method, path.replace("{exploration_id}", "0").replace("{owner}", "a"), headers=others[scope]
            )
            assert_problem(response, 403)
            assert response.json()["type"] == "urn:bexp:problem:insufficient-scope"
            assert f"'{scope}'" in response.json()["detail"]
            assert 'error="insufficient_scope"' in response.headers["WWW-Authenticate"]
            refused += 1
    assert refused >= 15


def test_a_token_with_one_scope_does_what_it_says(guarded: TestClient, sqlite_database: Database, queue: Queue) -> None:
    submitter = header(sqlite_database, "submitter", Scope.SUBMIT)
    submitted = guarded.post(HERE, json=REQUEST, headers=submitter)
    assert submitted.status_code == 202
    here = submitted.headers["Location"]
    assert guarded.get(here, headers=submitter).status_code == 403
    claim = queue.claim(make_worker("w"))
    assert claim is not None
    queue.record(claim.lease, make_progress(0))
    reader, canceller = (header(sqlite_database, scope, scope) for scope in (Scope.READ, Scope.CANCEL))
    assert guarded.get(here, headers=reader).json()["recommendation"] is not None
    queue.finish(claim.lease, JobState.CANCELLED)
    for path, headers, state in (("cancel", canceller, "cancelled"), ("resume", submitter, "queued")):
        shown = guarded.post(f"{here}/{path}", headers=headers).json()
        assert (shown["state"], shown["recommendation"], shown["micro_batch_size"]) == (state, None, None)


def test_what_belongs_to_another_owner_does_not_exist(guarded: TestClient, sqlite_database: Database) -> None:
    a, b = header(sqlite_database, "a"), header(sqlite_database, "b", owner="team-b")
    admin = header(sqlite_database, "ops", Scope.ADMIN, owner="ops")
    job = guarded.post(HERE, json=REQUEST, headers=a).json()
    assert (job["owner"], job["priority"]) == ("team-a", 0)
    unknown = guarded.get(f"{HERE}/0", headers=b)
    for path in ("", "/events", "/log", "/recommendation", "/trials", "/run-reports"):
        response = guarded.get(f"{HERE}/{job['id']}{path}", headers=b)
        assert_problem(response, 404)
        assert response.json()["detail"] == unknown.json()["detail"]
    for path in ("cancel", "run-reports"):
        assert_problem(guarded.post(f"{HERE}/{job['id']}/{path}", headers=b, json={}), 404)
    assert_problem(guarded.put(f"{HERE}/{job['id']}/notes", headers=b, json={"text": "mine"}), 404)
    assert guarded.get(HERE, headers=b).json()["items"] == []
    assert guarded.get(f"{HERE}?search=team-a", headers=b).json()["items"] == []
    own = guarded.post(HERE, json=REQUEST, headers=b).json()["id"]
    for one, other in ((own, job["id"]), (job["id"], own)):
        assert_problem(guarded.get(f"{HERE}/{one}/comparison?other={other}", headers=b), 404)
    assert guarded.post(f"{HERE}/{own}/cancel", headers=b).status_code == 200
    assert guarded.delete(f"{HERE}/{own}", headers=b).status_code == 204
    for seeing in (a, admin):
        assert [item["id"] for item in guarded.get(HERE, headers=seeing).json()["items"]] == [job["id"]]
        assert guarded.get(f"{HERE}/{job['id']}", headers=seeing).status_code == 200
    assert guarded.post(f"{HERE}/{job['id']}/cancel", headers=admin).json()["state"] == "cancelled"
    cancelled, submitted = (r for r in read_audit(sqlite_database) if r.subject == job["id"])
    assert (cancelled.owner, cancelled.token, cancelled.origin) == ("ops", "ops", "testclient")
    assert (submitted.owner, submitted.token, submitted.subject) == ("team-a", "a", job["id"])


def test_without_tokens_there_is_one_local_owner_who_sees_all(client: TestClient, sqlite_database: Database) -> None:
    assert client.post(HERE, json=REQUEST, params={"priority": 3}).json()["priority"] == 3
    claimed = Queue(sqlite_database).claim(make_worker("w"))
    assert claimed is not None
    Queue(sqlite_database).enqueue(claimed.request)
    assert {item["owner"] for item in client.get(HERE).json()["items"]} == {"local"}


def test_an_expired_token_is_refused_with_the_reason(guarded: TestClient, sqlite_database: Database) -> None:
    response = guarded.get(HERE, headers=header(sqlite_database, "old", lifetime=timedelta(seconds=-1)))
    assert_problem(response, 401)
    assert response.json()["detail"].startswith("The token expired at ")


def test_an_owner_that_stores_too_much_is_told_how_much_and_how_to_free_it(
    guarded: TestClient, sqlite_database: Database
) -> None:
    a = header(sqlite_database, "a")
    first = guarded.post(HERE, json=REQUEST, headers=a).json()["id"]
    assert guarded.post(f"{HERE}/{first}/cancel", headers=a).is_success
    set_quota(sqlite_database, "team-a", Quota(max_stored_bytes=1000))
    for refused in (guarded.post(HERE, json=REQUEST, headers=a), guarded.post(f"{HERE}/{first}/resume", headers=a)):
        assert_problem(refused, 403)
        assert refused.json()["type"] == "urn:bexp:problem:quota-exceeded"
        assert refused.json()["detail"].startswith("The explorations of owner 'team-a' take 0.0 MB, and its quota")
        assert "DELETE /v1/explorations/{id}" in refused.json()["detail"]
    assert guarded.delete(f"{HERE}/{first}", headers=a).is_success
    assert guarded.post(HERE, json=REQUEST, headers=a).status_code == 202


def test_a_token_is_looked_up_once_for_many_requests(
    settings: ServiceSettings, sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def count(database: Database, secret: str) -> Any:
        asked.append(secret)
        return verify_token(database, secret)

    monkeypatch.setattr(api_tokens, "verify_token", count)
    app = create_app(replace(settings, require_token=True, token_check_seconds=60.0))
    headers = header(sqlite_database, "a")
    with TestClient(app, base_url="http://bexp.example.org") as client:
        for _ in range(5):
            assert client.get(HERE, headers=headers).status_code == 200
        assert len(asked) == 1
        for _ in range(3):  # what is no token is not remembered
            assert client.get(HERE, headers={"Authorization": "Bearer bexp_x"}).status_code == 401
        assert len(asked) == 4
        monkeypatch.setattr(api_tokens, "MAX_KEPT", 2)
        others = [header(sqlite_database, name) for name in "bc"]
        for each in (others[0], headers, others[1], *others, headers):  # the third takes the place of the first
            client.get(HERE, headers=each)
    assert len(asked) == 7


@pytest.mark.parametrize("end", ["revoked", "expired"])
@pytest.mark.parametrize("path", ["events", "log?follow=true"])
def test_a_stream_ends_with_its_token_and_others_go_on(
    serve: Callable[[ServiceSettings], Served],
    settings: ServiceSettings,
    sqlite_database: Database,
    queue: Queue,
    path: str,
    end: str,
) -> None:
    served = serve(replace(settings, require_token=True))
    ending = header(sqlite_database, "ending")
    staying = header(sqlite_database, "staying")
    job = httpx.post(f"{served.url}{HERE}", json=REQUEST, headers=staying).json()
    url = f"{served.url}{HERE}/{job['id']}/{path}"
    ended: list[dict[str, str]] = []

    def read_to_end(headers: dict[str, str]) -> None:
        with httpx.stream("GET", url, headers=headers, timeout=PATIENCE_SECONDS) as response:
            assert response.status_code == 200
            for _ in response.iter_lines():
                pass
        ended.append(headers)

    threads = [threading.Thread(target=read_to_end, args=(headers,)) for headers in (ending, staying)]
    for thread in threads:
        thread.start()
    wait_until(lambda: served.num_watchers == 2)
    if end == "revoked":
        revoke_token(sqlite_database, "ending")
    else:
        with sqlite_database.begin() as connection:
            past = sqlite_database.clock(-timedelta(seconds=1))
            connection.execute(sa.update(tokens).where(tokens.c.name == "ending").values(expires_at=past))
    threads[0].join(PATIENCE_SECONDS)
    assert ended == [ending]
    assert threads[1].is_alive()
    wait_until(lambda: httpx.get(url, headers=ending).status_code == 401)
    queue.request_cancel(job["id"])
    threads[1].join(PATIENCE_SECONDS)
    assert len(ended) == 2


@pytest.mark.parametrize("path", ["events", "log?follow=true"])
def test_a_stream_beyond_those_that_there_may_be_is_refused(
    settings: ServiceSettings, queue: Queue, job: Job, path: str
) -> None:
    queue.request_cancel(job.id)  # a stream that is not refused ends
    with in_process(replace(settings, max_connections=4)) as client, ExitStack() as stack:
        limits = client.app.state.service.stream_limits  # type: ignore[attr-defined]  # of the application it holds
        for _ in range(3):
            stack.enter_context(limits.count(None))
        refused = client.get(f"{HERE}/{job.id}/{path}")
    assert_problem(refused, 503)
    assert refused.json()["type"] == "urn:bexp:problem:too-many-streams"
    assert int(refused.headers["Retry-After"]) > 0


def test_requests_above_the_rate_get_429(
    settings: ServiceSettings, sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bexp.api.service.RateLimiter", partial(RateLimiter, clock=lambda: 100.0))
    limits = replace(settings, require_token=True, token_check_seconds=60.0, token_rate=1.0, address_rate=2.0)
    app = create_app(limits)
    a, b = header(sqlite_database, "a"), header(sqlite_database, "b")
    with TestClient(app, base_url="http://bexp.example.org") as client:
        answers = [client.get(HERE, headers=a) for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2
        assert_problem(answers[-1], 429)
        assert answers[-1].json()["type"] == "urn:bexp:problem:rate-limited"
        assert answers[-1].json()["detail"] == "This token has sent more than 1 requests a second."
        assert answers[-1].headers["Retry-After"] == "1"
        assert client.get(HERE, headers=b).status_code == 200
        others = [header(sqlite_database, f"client-{i}") for i in range(5)]
        assert [client.get(HERE, headers=one).status_code for one in others] == [200] * 5
        # Those seven were looked up. With no token, or one that is not valid, the address counts: no secret is guessed.
        guesses = [client.get(HERE, headers=guess) for guess in ({"Authorization": "Bearer x"}, {}, *others)]
        assert [answer.status_code for answer in guesses] == [401, 429, *[200] * 5]
        assert guesses[1].json()["detail"] == "This address has sent more than 2 requests a second."
        assert client.get("/healthz").status_code == 200


def test_a_rate_allows_a_burst_and_then_one_after_the_other() -> None:
    now = 100.0
    limiter = RateLimiter(2.0, clock=lambda: now)
    burst = int(2 * BURST_SECONDS)
    assert [limiter.wait_seconds("a") for _ in range(burst)] == [0.0] * burst
    assert limiter.wait_seconds("a") == pytest.approx(0.5)
    assert limiter.wait_seconds("a") == pytest.approx(0.5), "a refused request does not count"
    assert limiter.wait_seconds("b") == 0
    now += 0.5
    assert limiter.wait_seconds("a") == 0
    assert limiter.wait_seconds("a") > 0
    now += 1000
    assert [limiter.wait_seconds("a") for _ in range(burst)] == [0.0] * burst
    assert limiter.wait_seconds("a") == pytest.approx(0.5), "what is not used is not kept"
    slow = RateLimiter(0.01, clock=lambda: now)
    assert [slow.wait_seconds("a") > 0 for _ in range(2)] == [False, True]
    assert not any(RateLimiter(0.0).wait_seconds("a") for _ in range(1000))


def test_the_keys_of_a_rate_are_bounded() -> None:
    limiter = RateLimiter(1.0, clock=lambda: 0.0)
    for i in range(MAX_KEYS + 10):
        limiter.wait_seconds(str(i))
    assert len(limiter._empty_at) == MAX_KEYS


def test_a_network_of_an_ipv6_host_is_one_address() -> None:
    assert address_key("10.1.2.3") == "10.1.2.3"
    assert address_key("2001:db8:1:2:3::4") == address_key("2001:db8:1:2::9") != address_key("2001:db8:1:3::9")
    assert address_key(None) == address_key("") == "unknown"
    assert address_key("testclient") == "testclient"


def test_an_administrator_reads_the_audit_page_by_page(guarded: TestClient, sqlite_database: Database) -> None:
    admin = header(sqlite_database, "root", Scope.ADMIN, owner="ops")
    for owner in ("team-a", "team-b"):
        assert guarded.put(f"/v1/owners/{owner}/quota", json={"max_queued": 1}, headers=admin).is_success
    first = guarded.get("/v1/audit", params={"limit": 2}, headers=admin).json()
    assert [(one["action"], one["subject"], one["owner"], one["token"]) for one in first["items"]] == [
        ("set quota", "team-b", "ops", "root"),
        ("set quota", "team-a", "ops", "root"),
    ]
    rest = guarded.get("/v1/audit", params={"cursor": first["next_cursor"]}, headers=admin).json()
    assert [one["action"] for one in rest["items"]] == ["create token"]
    assert rest["next_cursor"] is None
    assert guarded.get("/v1/audit", params={"owner": "team-a"}, headers=admin).json()["items"] == []


def test_an_administrator_sets_and_removes_quotas(guarded: TestClient, sqlite_database: Database) -> None:
    admin = header(sqlite_database, "root", Scope.ADMIN)
    here, everybody = "/v1/owners/team-a/quota", "/v1/owners/*/quota"
    none = {"max_queued": None, "max_running": None, "max_stored_bytes": None}
    assert guarded.get(here, headers=admin).json() == none | {"owner": "team-a", "inherited": True}
    assert guarded.put(everybody, json={"max_running": 2}, headers=admin).json()["max_running"] == 2
    assert guarded.get(here, headers=admin).json() == none | {"max_running": 2, "owner": "team-a", "inherited": True}
    own = guarded.put(here, json={"max_queued": 0, "max_running": 60}, headers=admin).json()
    assert own == none | {"max_queued": 0, "max_running": 60, "owner": "team-a", "inherited": False}
    listed = guarded.get("/v1/quotas", headers=admin).json()["items"]
    assert [one["owner"] for one in listed] == ["*", "team-a"]
    submitter = header(sqlite_database, "ci")
    assert_problem(guarded.post(HERE, json=REQUEST, headers=submitter), 429)
    assert guarded.put(here, json={}, headers=admin).json()["inherited"]
    for wrong in ({"max_queued": -1}, {"max_queued": "5"}, {"queued": 5}):
        assert_problem(guarded.put(here, json=wrong, headers=admin), 422)
    assert_problem(guarded.put("/v1/owners/-/quota", json={}, headers=admin), 404)


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
