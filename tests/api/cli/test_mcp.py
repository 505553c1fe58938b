"""`bexp mcp` as the official SDK's client sees it: over stdin and stdout, and over HTTP with the service's tokens."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

pytest.importorskip("mcp", reason="the extra mcp is not installed")

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer
from starlette.responses import Response

from bexp.api.agents import http, server
from bexp.api.agents.commands import Commands
from bexp.api.agents.http import Guard, create_app
from bexp.api.cli import app
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
from tests.api.test_peers import OTHER, ask_as, linux, needs_root
from tests.waits import PATIENCE_SECONDS

Worker = Callable[..., AbstractContextManager[None]]
Call = Callable[..., Awaitable[Any]]
MESSAGE = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
ACCEPTED = {"Accept": "application/json, text/event-stream"}
READING = {"status", "best", "compare", "trials"}


def talk(server: Any, conversation: Callable[[Client, Call], Awaitable[None]], **headers: str) -> None:
    """Hold a conversation with a server; `call` returns the document of a tool, or the text of its failure."""

    async def main() -> None:
        async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE_SECONDS) as http_client:
            over_http = isinstance(server, str)
            await hold(streamable_http_client(server, http_client=http_client) if over_http else server)

    async def hold(transport: Any) -> None:
        async with Client(transport) as client:

            async def call(tool: str, **arguments: Any) -> Any:
                result = await client.call_tool(tool, arguments)
                return getattr(result.content[0], "text", None) if result.is_error else result.structured_content

            await conversation(client, call)

    anyio.run(main)


def serve(service_url: str, host: str = "127.0.0.1") -> Iterator[str]:
    listener = bind(host, 0)
    listener.listen()  # a client may connect before the thread has begun
    server = uvicorn.Server(uvicorn.Config(create_app(service_url, host), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://{host}:{listener.getsockname()[1]}/mcp"
    server.should_exit = True
    thread.join(PATIENCE_SECONDS)


@pytest.fixture
def open_service(service: str) -> Iterator[str]:
    """The address of a server for a service that asks its own user for no token."""
    yield from serve(service)


@pytest.fixture
def requiring(queue: Queue) -> Iterator[str]:
    """The address of a service that requires tokens."""
    served = start(ServiceSettings(queue.database.url, require_token=True, poll_seconds=0.05))
    yield served.url
    served.stop()


@pytest.fixture
def guarded(requiring: str, queue: Queue) -> Iterator[tuple[str, Database]]:
    """The address of a server for a service that requires tokens, and the database of that."""
    for url in serve(requiring):
        yield url, queue.database


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
    monkeypatch.setattr(http, "find_peer", lambda *_: Peer("127.0.0.1", 12_345))
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
    served: list[tuple[str, bool]] = []
    monkeypatch.setattr(uvicorn, "run", lambda *_, host, proxy_headers, **__: served.append((host, proxy_headers)))
    with pytest.raises(CommandError, match="--require-token"):
        http.serve(service, "0.0.0.0", 1)
    http.serve(requiring, "0.0.0.0", 1)
    http.serve(service, "127.0.0.1", 1)
    assert served == [("0.0.0.0", False), ("127.0.0.1", False)], "a header makes nobody this user"


def test_the_guard_waits_for_no_tool_and_hands_on_what_it_has_checked(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append([header for header in scope["headers"] if header[0] == b"authorization"])
        await Response()(scope, receive, send)

    async def main() -> None:
        guard = Guard(app, service, "127.0.0.1")
        threads = anyio.to_thread.current_default_thread_limiter()
        for _ in range(int(threads.total_tokens)):  # as many tools
            threads.acquire_on_behalf_of_nowait(object())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://127.0.0.1") as client:
            with anyio.fail_after(20):
                assert (await client.get("/", headers={"Authorization": "Basic eDp5"})).status_code == 200

    monkeypatch.setattr(http, "find_peer", lambda *_: Peer("127.0.0.1", os.geteuid()))
    anyio.run(main)
    assert seen == [[]]


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
        assert begun["job"]["state"] in {"starting", "queued", "running"}
        while "no exploration yet" in (status := await call("status", exploration=job_id)) or (
            status["job"]["state"] in {"queued", "running"}
        ):
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
            commands.start("best", "latest", "--json").wait(PATIENCE_SECONDS)
        assert endless.wait(0.0) is None
        assert commands.exploration("latest") == "latest"
        with pytest.raises(CommandError, match="command-1 has begun no exploration yet; ask again"):
            commands.exploration("command-1")
        with pytest.raises(CommandError, match="there is no exploration yet"):  # what it has said
            commands.exploration("command-2")
    assert endless._process.returncode is not None


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Starts Python with a program in place of `bexp`."""
    monkeypatch.setattr("bexp.api.agents.commands.module_command", lambda _, *arguments: [sys.executable, *arguments])
    with Commands() as started:
        yield started


def test_a_command_is_known_by_a_number_until_it_has_an_exploration(commands: Commands, tmp_path: Path) -> None:
    follow = "import sys; sys.stderr.write('exploration ab12, kept in x\\n'); sys.stderr.flush(); input(); print('{}')"
    names = [commands.start("-c", program, folder=tmp_path).name for program in ("pass", "import time; time.sleep(99)")]
    assert names == ["command-1", "command-2"]
    assert commands.exploration("ab12") == "ab12"
    with pytest.raises(CommandError, match="command-2 has begun no exploration yet; ask again"):
        commands.exploration("command-2")
    following = commands.start("-c", follow, stdin="\n")
    assert following.wait(PATIENCE_SECONDS) == {}
    assert commands.exploration(following.name) == "ab12"


def test_a_command_that_cannot_begin_leaves_no_files(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        commands.start("-c", "pass", stdin="secret", folder=tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_a_command_that_fails_says_its_last_lines_and_one_that_goes_on_is_waited_for(commands: Commands) -> None:
    failed = commands.start("-c", "import sys; [print(number, file=sys.stderr) for number in range(10)]; sys.exit(3)")
    with pytest.raises(CommandError) as caught:
        failed.wait(PATIENCE_SECONDS)
    assert (caught.value.code, caught.value.lines) == (3, tuple("23456789"))
    with pytest.raises(CommandError, match="9"):
        commands.exploration(failed.name)
    goes_on = commands.start("-c", "import time; time.sleep(99)")
    began = time.monotonic()
    assert goes_on.wait(0.3) is None
    assert time.monotonic() - began >= 0.3
    assert goes_on._process.poll() is None
    files = goes_on._files
    goes_on.stop()
    assert (goes_on._process.returncode, files.exists()) == (-15, False)


class Started:
    """In place of a command that was started."""

    name, job_id = "command-7", None

    def __init__(self, *arguments: str, stdin: str = "", folder: Path | None = None) -> None:
        self.arguments, self.stdin, self.folder = arguments, stdin, folder

    def wait(self, seconds: float) -> dict[str, Any] | None:
        return {"waited": seconds} if seconds >= 1 else None


@pytest.mark.parametrize(
    ("service", "device", "started"),
    [
        (False, None, ("explore", "-", "--json")),
        (False, "cpu", ("explore", "-", "--json", "--device", "cpu")),
        (True, "cpu", ("explore", "-", "--json", "--device", "cpu")),
        (True, None, None),
    ],
)
def test_an_agent_explores_here_unless_a_service_is_named_and_no_device(
    monkeypatch: pytest.MonkeyPatch, service: bool, device: str | None, started: tuple[str, ...] | None
) -> None:
    commands, tools = list[Started](), dict[str, Callable[..., dict[str, Any]]]()

    def start(*arguments: str, **others: Any) -> Started:
        commands.append(Started(*arguments, **others))
        return commands[-1]

    def last() -> Started:
        return commands[-1]

    monkeypatch.setattr(server, "connect", lambda: nullcontext("client"))
    monkeypatch.setattr(server, "_submit", lambda *given: {"submitted": given[1:]})
    here: Any = SimpleNamespace(add_tool=lambda tool: tools.setdefault(tool.__name__, tool))
    server.add_local_tools(here, SimpleNamespace(start=start), service=service)  # type: ignore[arg-type]  # all it asks
    expected = {**TINY, "batch_size": 48}
    answer = tools["explore"](TINY, {"batch_size": 48}, device, 5.0)
    if started is None:
        assert (answer, commands) == ({"submitted": (expected, 5.0)}, [])
        return
    (command,) = commands
    assert (answer, command.arguments, json.loads(command.stdin)) == ({"waited": 5.0}, started, expected)
    starting = {"job": {"id": "command-7", "state": "starting"}, "certainty": None}
    assert tools["tune"](["python", "x.py"], ["--batch-size", "8"], "/data", 0.0) == starting
    assert last().arguments == ("tune", "--json", "--batch-size", "8", "--", "python", "x.py")
    assert last().folder == Path("/data")
    assert tools["explore"](TINY, None, "cpu") == tools["tune"](["true"]) == {"waited": 30.0}
    assert (last().arguments, last().folder) == (("tune", "--json", "--", "true"), None)
    assert tools["doctor"]() == {"waited": math.inf}
    assert last().arguments == ("doctor", "--json")


def test_a_tool_of_this_machine_is_told_a_command_and_how_long_to_wait() -> None:
    tools = MCPServer("bexp")
    server.add_local_tools(tools, SimpleNamespace(start=Started), service=False)  # type: ignore[arg-type]  # all it asks

    async def conversation(_: Client, call: Call) -> None:
        for name, given in (("tune", {"command": ["true"]}), ("explore", {"config": TINY})):
            assert await call(name, **given, wait_seconds=3600) == {"waited": 3600}
            for seconds in (-1, 3601):
                assert "wait_seconds" in await call(name, **given, wait_seconds=seconds)
        assert "command" in await call("tune", command=[])

    talk(tools, conversation)


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


@pytest.mark.parametrize("url", [None, "http://h:1"])
def test_over_stdio_explorations_go_to_the_service_that_is_named(
    monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    did: list[Any] = []
    monkeypatch.setattr(server, "build_server", lambda *_: SimpleNamespace(run=did.append))
    monkeypatch.setattr(server, "add_local_tools", lambda *_, service: did.append(service))
    monkeypatch.delenv("BEXP_API_URL", raising=False)
    assert CliRunner().invoke(app, ["mcp"], env={"BEXP_API_URL": url}).exit_code == 0
    assert did == [url is not None, "stdio"]
