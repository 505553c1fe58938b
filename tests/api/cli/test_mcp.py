"""`bexp mcp` as the official SDK's client sees it: over stdin and stdout, and over HTTP with the service's tokens."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import uvicorn

pytest.importorskip("mcp", reason="the extra mcp is not installed")

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from bexp.api.agents import http
from bexp.api.agents.commands import Commands
from bexp.api.agents.http import create_app
from bexp.api.cli.errors import CommandError
from bexp.api.peers import Peer
from bexp.api.serve import bind
from bexp.api.settings import ServiceSettings
from bexp.storage.database import Database
from bexp.storage.owners import Scope
from bexp.storage.queue import Queue
from bexp.storage.tokens import create_token
from tests.acceptance.test_explore import TABLES
from tests.api.cli.samples import TINY
from tests.api.serving import start

Worker = Callable[..., AbstractContextManager[None]]
Call = Callable[..., Awaitable[Any]]
READING = {"status", "best", "compare", "trials"}


def talk(server: Any, conversation: Callable[[Client, Call], Awaitable[None]], **headers: str) -> None:
    """Hold a conversation with a server; `call` returns the document of a tool, or the text of its failure."""

    async def main() -> None:
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http_client:
            over_http = isinstance(server, str)
            await hold(streamable_http_client(server, http_client=http_client) if over_http else server)

    async def hold(transport: Any) -> None:
        async with Client(transport) as client:

            async def call(tool: str, **arguments: Any) -> Any:
                result = await client.call_tool(tool, arguments)
                return getattr(result.content[0], "text", None) if result.is_error else result.structured_content

            await conversation(client, call)

    anyio.run(main)


def serve(service_url: str) -> Iterator[str]:
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(service_url, "127.0.0.1"), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def open_service(service: tuple[str, str]) -> Iterator[str]:
    """The address of a server for a service that asks its own user for no token."""
    yield from serve(service[0])


@pytest.fixture
def guarded(queue: Queue) -> Iterator[tuple[str, Database]]:
    """The address of a server for a service that requires tokens, and the database of that."""
    served = start(ServiceSettings(queue.database.url, require_token=True, poll_seconds=0.05))
    for url in serve(served.url):
        yield url, queue.database
    served.stop()


def test_over_http_an_agent_explores_on_the_service(open_service: str, worker: Worker) -> None:
    async def conversation(client: Client, call: Call) -> None:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == READING | {"explore", "doctor"}  # a command to tune would run on the server's machine
        explored = await call("explore", config=TINY, fields={"fresh": True, "batch_size": 48}, wait_seconds=60)
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
        assert "explore" in await call("explore", config="/etc/passwd")  # a path of the server's machine

    with worker():
        talk(open_service, conversation)


def test_over_http_the_tokens_are_the_services(guarded: tuple[str, Database], monkeypatch: pytest.MonkeyPatch) -> None:
    url, database = guarded
    reader = create_token(database, "reader", owner="mcp-test", scopes={Scope.READ})
    monkeypatch.setenv("BEXP_API_TOKEN", create_token(database, "the-servers-own", owner="mcp-test"))
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accepted = {"Accept": "application/json, text/event-stream"}
    for headers in ({}, {"Authorization": "Bearer bexp_wrong"}, {"Authorization": "Basic eDp5"}):
        refused = httpx.post(url, json=message, headers={**accepted, **headers})
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")

    async def conversation(_: Client, call: Call) -> None:
        assert "there is no exploration yet" in await call("status", exploration="latest")  # that of other owners
        assert "scope 'submit'" in await call("explore", config=TINY)

    talk(url, conversation, Authorization=f"Bearer {reader}")


def test_without_a_token_another_user_is_refused(open_service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service would take the request for one of this process's user."""
    post = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accepted = {"Accept": "application/json, text/event-stream"}
    assert httpx.post(open_service, json=post, headers={**accepted, "Host": "evil.example"}).status_code == 421
    assert httpx.post(open_service, json=post, headers={**accepted, "X-Forwarded-For": "10.1.1.1"}).status_code == 401
    monkeypatch.setattr(http, "find_peer", lambda *_: Peer("127.0.0.1", 12_345))
    assert httpx.post(open_service, json=post, headers=accepted).status_code == 401


@pytest.mark.slow
def test_over_stdio_an_agent_explores_on_this_machine(tmp_path: Path) -> None:
    """A recording takes the place of a GPU."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BEXP_")}
    environment |= {"BEXP_DATABASE_URL": f"sqlite:///{tmp_path}/bexp.db", "BEXP_LOCK_DIRECTORY": str(tmp_path)}
    command = ["-P", "-m", "bexp.api.cli", "mcp"]
    server = StdioServerParameters(command=sys.executable, args=command, env=environment, cwd=TABLES.parent)

    async def conversation(client: Client, call: Call) -> None:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == READING | {"explore", "tune", "doctor"}
        begun = await call(
            "explore",
            config="benchmarks/tables/gpt2-124m.yaml",
            fields={"budget": {"max_trials": 3}, "micro_batch_size": [4, 8], "recompute": ["none"], "verify": False},
            device="replay:benchmarks/results/tables/gpt2-124m.jsonl",
            wait_seconds=0,
        )
        job_id = begun["job"]["id"]
        while (status := await call("status", exploration=job_id))["job"]["state"] in {"queued", "running"}:
            await anyio.sleep(0.1)
        assert status["job"]["state"] == "succeeded"
        best = await call("best", exploration=job_id)
        assert best["recommendation"]["candidate"]["micro_batch_size"] == status["job"]["micro_batch_size"]
        assert best["certainty"]["next_measurement"]["worth_at_most"] >= 0.0
        assert "no such option" in (await call("tune", command=["true"], options=["--nonsense"])).lower()

    talk(server, conversation)


def test_a_command_that_goes_on_ends_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", f"sqlite:///{tmp_path}/bexp.db")
    with Commands() as commands:
        endless = commands.start("serve", "--port", "0")
        with pytest.raises(CommandError, match="no exploration yet"):
            commands.start("best", "latest", "--json").wait(60)
        assert endless._process.poll() is None
    assert endless._process.returncode is not None
