"""Clients that open connections and send nothing, too little, or only a part."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bexp.api.listener import BACKLOG, Server, allow_connections
from bexp.api.settings import Limits, ServiceSettings
from tests.api.forked import forked
from tests.api.serving import Served
from tests.waits import PATIENCE_SECONDS

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
