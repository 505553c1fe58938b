"""The limits of every listener: what `bexp serve` grants its clients, `bexp mcp --http` grants its own; and its log."""

from __future__ import annotations

import ast
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bexp.api.examples import REQUEST
from bexp.api.listener import BACKLOG, Server, allow_connections
from bexp.api.settings import Limits, ServiceSettings
from bexp.storage.database import Database
from bexp.storage.tokens import create_token
from tests.api.forked import forked
from tests.api.serving import Served, start_app
from tests.waits import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
MCP = {"Accept": "application/json, text/event-stream"}
LISTENERS = ("serve", "mcp")


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    """The message that calls a tool."""
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


@dataclass(frozen=True)
class Listener:
    """One of the listeners, what is sent to it by POST, and what it is asked for that takes long to answer."""

    name: str
    url: str
    path: str
    message: dict[str, Any]
    long: tuple[str, str, dict[str, Any] | None]

    def send(self, message: Any = None, **headers: str) -> httpx.Response:
        """Send something by POST."""
        given = self.message if message is None else message
        return httpx.post(f"{self.url}{self.path}", json=given, headers={**MCP, **headers}, timeout=PATIENCE_SECONDS)

    def head(self, *more: str) -> bytes:
        """The header of a request with a body, which may go on after the lines of `more`."""
        lines = (f"POST {self.path} HTTP/1.1", "Host: localhost:1", "Content-Type: application/json", *more)
        return "".join(f"{line}\r\n" for line in lines).encode()

    def begin(self, stack: ExitStack, secret: str) -> socket.socket:
        """Begin what takes long to answer."""
        method, path, document = self.long
        body = b"" if document is None else json.dumps(document).encode()
        named = [f"{name}: {value}" for name, value in MCP.items()] if document is not None else []
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: localhost:1",
            "Content-Type: application/json",
            f"Authorization: Bearer {secret}",
            f"Content-Length: {len(body)}",
            *named,
        ]
        return connect(self.url, stack, "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body)


Listen = Callable[..., Listener]


@pytest.fixture(params=LISTENERS)
def listen(
    request: pytest.FixtureRequest, serve: Callable[[ServiceSettings], Served], settings: ServiceSettings
) -> Iterator[Listen]:
    """Starts a listener with other limits than usual, on a service that has them if it is that itself."""
    running: list[Served] = []

    def start_one(**changes: Any) -> Listener:
        if request.param == "serve":
            served = serve(replace(settings, **changes))
            job_id = httpx.post(f"{served.url}/v1/explorations", json=REQUEST).json()["id"]
            log = f"/v1/explorations/{job_id}/log?follow=true"
            return Listener("serve", served.url, "/v1/explorations", REQUEST, ("GET", log, None))
        pytest.importorskip("mcp", reason="the extra mcp is not installed")
        from bexp.api.agents.http import create_app

        limits = replace(Limits(header_seconds=60.0, body_seconds=60.0, answer_seconds=60.0), **changes)
        running.append(start_app(create_app(serve(settings).url, "127.0.0.1", limits), limits))
        waits = call("explore", config=REQUEST, fields={"fresh": True}, wait_seconds=10)
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        return Listener("mcp", running[-1].url, "/mcp", message, ("POST", "/mcp", waits))

    yield start_one
    for served in running:
        served.stop()


@pytest.fixture
def secret(sqlite_database: Database) -> str:
    return create_token(sqlite_database, "limited")


def was_closed(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE_SECONDS)  # much less than the time for a header
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", ["nothing", "a byte", "a part"])
def test_a_connection_without_a_whole_header_is_closed(listen: Listen, opened: ExitStack, sent: str) -> None:
    listener = listen(header_seconds=0.4)
    connection = connect(listener.url, opened, {"nothing": b"", "a byte": b"G", "a part": listener.head()}[sent])
    with suppress(ConnectionResetError):  # an orderly end is as good
        assert connection.recv(1) == b""


def test_single_bytes_do_not_extend_the_time_for_a_header(listen: Listen, opened: ExitStack) -> None:
    connection = connect(listen(header_seconds=0.4).url, opened)
    with pytest.raises(OSError, match=r"reset|[Bb]roken|closed"):
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            connection.sendall(b"G")
            time.sleep(0.05)


def test_a_body_that_does_not_arrive_is_refused(listen: Listen, opened: ExitStack) -> None:
    listener = listen(body_seconds=0.4)
    connection = connect(listener.url, opened, listener.head("Content-Length: 100", "", "{"))
    assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("how", ["Content-Length: 1001", "Transfer-Encoding: chunked"])
def test_a_body_that_is_too_large_is_refused(listen: Listen, opened: ExitStack, how: str) -> None:
    listener = listen(max_body_bytes=1000)
    connection = connect(listener.url, opened, listener.head(how, "", "3e9", "x" * 1001))
    assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_idle_connections_make_room_for_a_new_one(
    listen: Listen, opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen(max_connections=20, header_seconds=2 * PATIENCE_SECONDS)
    caplog.clear()
    connections = [connect(listener.url, opened, b"P") for _ in range(60)]
    assert listener.send().status_code in {200, 202}
    for oldest in connections[:40]:
        assert was_closed(oldest)
    told = "there are 20 connections, which is the limit: the one that has waited longest for a request is closed"
    assert set(caplog.messages) == {told}
    connections[41].settimeout(PATIENCE_SECONDS)
    connections[41].sendall(listener.head("Content-Length: 2", "", "{}")[1:])
    assert connections[41].recv(9) == b"HTTP/1.1 ", "19 and the new one are not too many"


def test_a_new_connection_is_closed_if_all_others_have_a_request(
    listen: Listen, opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    listener = listen(max_connections=2, header_seconds=2 * PATIENCE_SECONDS)
    caplog.clear()
    head = listener.head("Content-Length: 5", "Expect: 100-continue", "")
    busy = [connect(listener.url, opened, head) for _ in range(2)]
    assert [connection.recv(12) for connection in busy] == [b"HTTP/1.1 100"] * 2
    assert was_closed(connect(listener.url, opened))
    assert caplog.messages == ["there are 2 connections, which is the limit: a new one is closed"]


@pytest.mark.parametrize("limit", ["token_rate", "address_rate"])
def test_too_many_requests_of_a_token_or_an_address_are_refused(listen: Listen, secret: str, limit: str) -> None:
    listener = listen(**{limit: 0.5})
    token = secret if limit == "token_rate" else "bexp_wrong"
    answers = [listener.send(Authorization=f"Bearer {token}") for _ in range(4)]
    admitted = {200, 202} if limit == "token_rate" else {401}
    assert {answer.status_code for answer in answers[:1]} <= admitted
    assert (answers[-1].status_code, int(answers[-1].headers["Retry-After"]) > 0) == (429, True)
    assert answers[-1].json()["type"] == "urn:bexp:problem:rate-limited"


def test_what_a_token_has_open_is_limited_and_another_token_has_its_own(
    listen: Listen, opened: ExitStack, secret: str, sqlite_database: Database
) -> None:
    listener = listen(token_streams=1)
    mine: list[socket.socket] = []

    def status(connection: socket.socket) -> bytes:
        connection.settimeout(0.2)
        with suppress(TimeoutError):
            return connection.recv(12, socket.MSG_PEEK)
        return b"it waits"

    def is_refused() -> bool:
        mine.append(listener.begin(opened, secret))
        return b"HTTP/1.1 429" in map(status, mine)  # what arrives in the same moment may all be admitted

    wait_until(is_refused)
    goes_on = {b"HTTP/1.1 200", b"it waits"}
    assert goes_on & set(map(status, mine))
    assert status(listener.begin(opened, create_token(sqlite_database, "other"))) in goes_on


def test_what_takes_too_long_to_answer_is_refused(
    listen: Listen, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because of the database, or over MCP of the service."""
    with suppress(ModuleNotFoundError):
        monkeypatch.setattr("bexp.api.agents.http.REMOTE_SECONDS", 0.0)
    listener, may_end = listen(answer_seconds=0.3), threading.Event()
    opened.callback(may_end.set)
    waits = {"serve": "bexp.storage.queue.Queue.enqueue", "mcp": "bexp.client.client.Connection.request"}
    monkeypatch.setattr(waits[listener.name], lambda *_, **__: may_end.wait(PATIENCE_SECONDS))
    answer = listener.send()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")


def test_who_forwards_is_believed_only_if_named(listen: Listen) -> None:
    listener = listen()
    answer = listener.send(**{"X-Forwarded-For": "127.0.0.1"})
    assert answer.status_code == {"serve": 403, "mcp": 401}[listener.name]
    assert "server" not in answer.headers


@pytest.mark.slow(together="services")
@pytest.mark.parametrize("name", LISTENERS)
def test_more_idle_connections_than_open_files_keep_nobody_out(name: str, sqlite_url: str, opened: ExitStack) -> None:
    served = opened.enter_context(forked("serve", open_files=512, BEXP_DATABASE_URL=sqlite_url))
    if name == "mcp":
        pytest.importorskip("mcp", reason="the extra mcp is not installed")
        served = opened.enter_context(forked("mcp", "--http", open_files=512, BEXP_API_URL=served.url))
    address = urlsplit(served.url)
    url = f"{address.scheme}://{address.netloc}"
    crowd = [connect(url, opened) for _ in range(700)]
    path, answers = {"serve": ("/healthz", 200), "mcp": ("/nothing", 404)}[name]
    for _ in range(3):
        assert httpx.get(f"{url}{path}", timeout=PATIENCE_SECONDS).status_code == answers
    assert was_closed(crowd[0])
    code, log = served.end()
    assert code == 0
    assert "out of system resource" not in log
    assert 0 < log.count("\n") < 400, "each connection does not cost a line"


KNOWN = {
    "api/listener.py": {"uvicorn", "listen"},
    "workers/profiler/distributed/message_queue.py": {"create_server"},  # of the processes of a group, on loopback
    "workers/targets/custom/training_line.py": {"listen"},  # a Unix socket in a folder of this user's
}
SERVERS = {"uvicorn", "hypercorn", "gunicorn", "socketserver", "http.server", "xmlrpc.server", "wsgiref", "aiohttp"}
SERVES = {"listen", "create_server", "start_server", "start_unix_server", "start_http_server", "serve_forever"}


def test_there_is_no_other_way_to_listen() -> None:
    found: dict[str, set[str]] = {}
    for folder in ("api", "bexp", "explorer", "storage", "workers"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if not any(word in text for word in SERVERS | SERVES):
                continue  # it takes seconds to parse all
            if names := set(ways_to_listen(ast.parse(text))):
                found[path.relative_to(ROOT).as_posix()] = names
    assert found == KNOWN


def ways_to_listen(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if is_server(each.name))
            case ast.ImportFrom(module=str(module)) if is_server(module):
                yield module.partition(".")[0]
            case ast.Call(func=ast.Attribute(attr=name, value=of)) if name in SERVES:
                if ast.unparse(of).rpartition(".")[2] != "event":  # SQLAlchemy's
                    yield name


def is_server(module: str) -> bool:
    return any(module == server or module.startswith(f"{server}.") for server in SERVERS)


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("import uvicorn", "uvicorn"),
        ("from http.server import HTTPServer", "http"),
        ("await asyncio.start_server(f)", "start_server"),
        ("socket.socket().listen()", "listen"),
        ("sa.event.listen(pool, 'checkin', f)", None),
        ("event.listen(pool, 'checkin', f)", None),
    ],
)
def test_each_way_to_listen_is_found(code: str, way: str | None) -> None:
    assert list(ways_to_listen(ast.parse(code))) == ([] if way is None else [way])


HEAD = b"POST /v1/explorations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(url: str, stack: ExitStack, sent: bytes = b"") -> socket.socket:
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS)
    stack.enter_context(connection)
    connection.sendall(sent)
    return connection


def test_connections_wait_while_the_service_does_something_else(
    serve: Callable[[ServiceSettings], Served], settings: ServiceSettings, opened: ExitStack
) -> None:
    served, may_end = serve(settings), threading.Event()
    served.server.servers[0].get_loop().call_soon_threadsafe(may_end.wait)
    opened.callback(may_end.set)
    address = urlsplit(served.url)
    for _ in range(2 * BACKLOG):
        opened.enter_context(socket.create_connection((address.hostname, address.port), timeout=PATIENCE_SECONDS))


@pytest.mark.slow(together="services")
def test_a_client_that_leaves_costs_one_line_of_the_log(sqlite_url: str) -> None:
    with forked("serve", BEXP_DATABASE_URL=sqlite_url) as service, ExitStack() as stack:
        client = connect(service.url, stack, HEAD + b"Content-Length: 100\r\n\r\n{")
        httpx.get(f"{service.url}/healthz")  # after it, so that the service knows by now whose connection it is
        client.close()
        line = service.printed.readline()
        _, more = service.end()
    assert line == "warning: a client left before it had sent its request: /v1/explorations\n"
    assert more == ""


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "allowed"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1000),
        (1256, 4096, None, 1000),
        (1024, 4096, (1256, 4096), 1000),
        (1024, resource.RLIM_INFINITY, (1256, resource.RLIM_INFINITY), 1000),
        (512, 1024, (1024, 1024), 768),
        (100, 100, (100, 100), 16),
    ],
)
def test_as_many_connections_are_allowed_as_there_may_be_open_files(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None, allowed: int
) -> None:
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changes.append(limits))
    assert allow_connections(1000) == allowed
    assert changes == ([] if raised is None else [raised])


def test_a_slow_reader_gets_the_whole_of_a_large_response() -> None:
    """The response lies in memory when it is complete, and the time for the next header runs since then."""
    body = b"x" * 16_000_000

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    server = Server(app, Limits(max_connections=20, header_seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        stack.callback(thread.join)  # before the listener is closed
        stack.callback(setattr, server, "should_exit", True)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        reader, idle = (connect(url, stack, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(2))
        received = 0
        while received < len(body):
            part = reader.recv(1 << 20)
            assert part, received
            received += len(part)
            time.sleep(0.05)
        received = 0
        with suppress(ConnectionResetError):
            while part := idle.recv(1 << 20):
                received += len(part)
        assert received < len(body)
