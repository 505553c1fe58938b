"""`bexp mcp --http`: an agent works on a service, with the tokens of that, and as much as is its share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from typer.testing import CliRunner

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from mcp import Client
from starlette.responses import Response

from bexp.api import listener
from bexp.api.agents import http
from bexp.api.agents.http import Guard
from bexp.api.cli import app
from bexp.api.cli.errors import CommandError
from bexp.api.listener import bind
from bexp.api.peers import Peer
from bexp.api.settings import Limits
from bexp.storage.database import Database
from bexp.storage.owners import Scope
from bexp.storage.tokens import create_token
from tests.api.cli.conversations import ACCEPTED, MESSAGE, READING, Call, serve, talk
from tests.api.cli.samples import TINY
from tests.api.test_peers import OTHER, ask_as, linux, needs_root

Worker = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def open_service(service: str) -> Iterator[str]:
    """The address of a server for a service that asks its own user for no token."""
    yield from serve(service)


def test_over_http_an_agent_explores_on_the_service(open_service: str, worker: Worker) -> None:
    async def conversation(client: Client, call: Call) -> None:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == READING | {"explore", "doctor"}  # a command to tune would run on the server's machine
        explored = await call("explore", config=TINY, fields={"fresh": True, "batch_size": 48}, wait_seconds=10)
        job_id = explored["job"]["id"]
        assert (explored["job"]["state"], explored["job"]["request"]["batch_size"]) == ("succeeded", 48)
        assert explored["certainty"]["confidence"] == 87
        assert await call("best", exploration=job_id) == explored
        status = await call("status", exploration="latest")
        assert (status["job"]["id"], status["certainty"]) == (job_id, explored["certainty"])
        compared = await call("compare", a=job_id, b=job_id)
        assert compared["probability_b_faster"] == pytest.approx(0.5)
        measured = await call("trials", exploration=job_id)
        assert (measured["exploration"], measured["trials"]) == (job_id, [])
        assert await call("doctor") == {"workers": []}
        assert "no exploration begins with 'unknown'" in await call("best", exploration="unknown")
        assert "model.num_layers: is missing" in await call("explore", config={"model": {}})
        assert "config: is not a known field" in await call("explore", config=TINY, fields={"config": {}})
        assert "wait_seconds" in await call("explore", config=TINY, wait_seconds=10.5)  # it would hold a thread
        assert "explore" in await call("explore", config="/etc/passwd")  # a path of the server's machine

    with worker():
        talk(open_service, conversation)


def test_an_exploration_goes_on_when_the_wait_is_over(open_service: str) -> None:
    async def conversation(_: Client, call: Call) -> None:
        with anyio.fail_after(20):
            begun = await call("explore", config=TINY, fields={"fresh": True}, wait_seconds=0.3)
        assert begun["job"]["state"] == "queued"

    talk(open_service, conversation)


def test_over_http_the_tokens_are_the_services(guarded: tuple[str, Database], monkeypatch: pytest.MonkeyPatch) -> None:
    url, database = guarded
    reader = create_token(database, "reader", owner="mcp-test", scopes={Scope.READ})
    monkeypatch.setenv("BEXP_API_TOKEN", create_token(database, "the-servers-own", owner="mcp-test"))
    for headers in ({}, {"Authorization": "Bearer bexp_wrong"}, {"Authorization": "Basic eDp5"}):
        refused = httpx.post(url, json=MESSAGE, headers={**ACCEPTED, **headers})
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    two = [*ACCEPTED.items(), *[("Authorization", f"Bearer {token}") for token in ("bexp_wrong", reader)]]
    doubled = httpx.post(url, json=MESSAGE, headers=two)
    assert (doubled.status_code, doubled.headers.get("WWW-Authenticate")) == (400, None)

    async def conversation(_: Client, call: Call) -> None:
        assert "there is no exploration yet" in await call("status", exploration="latest")  # that of other owners
        assert "scope 'submit'" in await call("explore", config=TINY)

    talk(url, conversation, Authorization=f"Bearer {reader}")


def test_without_a_token_another_user_is_refused(open_service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service would take the request for one of this process's user."""

    def status(**headers: str) -> int:
        return httpx.post(open_service, json=MESSAGE, headers={**ACCEPTED, **headers}).status_code

    assert status() == 200
    assert status(**{"X-Forwarded-For": "10.1.1.1"}) == 401
    assert status(Authorization="Bearer x") == 401  # the service requires none, and checks it all the same
    monkeypatch.setattr(listener, "find_peer", lambda *_: Peer("127.0.0.1", 12_345))
    assert status() == status(Authorization="Bearer x") == 401


@linux
@needs_root
def test_the_kernel_says_who_sends_no_token(open_service: str) -> None:
    assert httpx.get(f"{open_service}/none").status_code == 404
    assert ask_as(OTHER, open_service)[0] == ask_as(OTHER, open_service, {"Authorization": "Bearer x"})[0] == 401


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("127.0.0.2", marks=linux)])
def test_a_page_that_rebinds_its_name_is_refused(service: str, host: str) -> None:
    for url in serve(service, host):
        assert httpx.post(url, json=MESSAGE, headers=ACCEPTED).status_code == 200
        assert httpx.post(url, json=MESSAGE, headers={**ACCEPTED, "Host": "evil.example"}).status_code == 421
        assert httpx.post(url, json=MESSAGE, headers={**ACCEPTED, "Origin": "http://evil.example"}).status_code == 403


def test_other_machines_are_served_only_if_the_service_requires_tokens(
    service: str, requiring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []
    monkeypatch.setattr(http, "listen", lambda listener, *_, **__: served.append(listener.getsockname()[0]))
    with pytest.raises(CommandError, match="--require-token"):
        http.serve(service, "0.0.0.0", 0)
    http.serve(requiring, "0.0.0.0", 0)
    http.serve(service, "127.0.0.1", 0)
    assert served == ["0.0.0.0", "127.0.0.1"]
    with bind("127.0.0.1", 0) as taken, pytest.raises(CommandError, match=r"cannot listen on 127\.0\.0\.1:"):
        taken.listen()
        http.serve(service, "127.0.0.1", taken.getsockname()[1])


def test_the_guard_waits_for_no_tool_and_hands_on_what_it_has_checked(service: str) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append([header for header in scope["headers"] if header[0] == b"authorization"])
        await Response()(scope, receive, send)

    async def main() -> None:
        guard = Guard(app, service, "127.0.0.1", Limits())

        async def own(scope: Any, receive: Any, send: Any) -> None:
            await guard({**scope, "state": {"peer": Peer("127.0.0.1", os.geteuid())}}, receive, send)

        threads = anyio.to_thread.current_default_thread_limiter()
        for _ in range(int(threads.total_tokens)):  # as many tools
            threads.acquire_on_behalf_of_nowait(object())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(own), base_url="http://127.0.0.1") as client:
            with anyio.fail_after(20):
                assert (await client.get("/", headers={"Authorization": "Basic eDp5"})).status_code == 200

    anyio.run(main)
    assert seen == [[]]


def test_over_http_a_service_is_needed_and_served_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, str, int]] = []
    monkeypatch.setattr(http, "serve", lambda *given: served.append(given))
    monkeypatch.delenv("BEXP_API_URL", raising=False)
    refused = CliRunner().invoke(app, ["mcp", "--http"])
    assert (refused.exit_code, served) == (2, [])
    assert refused.stderr == "bexp: --http serves a service: set BEXP_API_URL to its URL\n"
    monkeypatch.setenv("BEXP_API_URL", "http://h:1")
    assert CliRunner().invoke(app, ["mcp", "--http"]).exit_code == 0
    assert CliRunner().invoke(app, ["mcp", "--http", "--host", "::1", "--port", "80"]).exit_code == 0
    assert served == [("http://h:1", "127.0.0.1", 8643), ("http://h:1", "::1", 80)]
