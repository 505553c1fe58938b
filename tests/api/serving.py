"""An application on a port, in a thread; and one that is called in process."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import uvicorn
from fastapi.testclient import TestClient

from bexp.api.app import create_app
from bexp.api.connections import BACKLOG, ConnectionLimits, guarded_protocol
from bexp.api.peers import Peer
from bexp.api.serve import Server, bind
from bexp.api.settings import ServiceSettings
from tests.waits import PATIENCE_SECONDS

GRACE_SECONDS = 100
"""How long a service that is told to stop waits for its clients. Far more than any test needs."""


@dataclass
class Served:
    """An application on a port."""

    url: str
    server: Server
    thread: threading.Thread

    @property
    def num_watchers(self) -> int:
        number: int = self.server._app.state.service.feed.num_watchers
        return number

    def stop(self) -> float:
        """Shut down as on SIGTERM; return how many seconds that took."""
        start = time.monotonic()
        self.server.should_exit = True
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        return time.monotonic() - start


def in_process(settings: ServiceSettings, *, raise_server_exceptions: bool = True) -> TestClient:
    """A client of an application in this process. It is of the user who runs that."""
    app = create_app(_patient(settings))
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=raise_server_exceptions)
    client.app_state["peer"] = Peer("127.0.0.1", os.geteuid())
    client.event_hooks = {"response": [check_declared]}
    return client


def _patient(settings: ServiceSettings) -> ServiceSettings:
    """The settings, which give a busy host time to answer if a test has no limit of its own."""
    has_own = settings.answer_seconds != ServiceSettings("").answer_seconds
    return settings if has_own else replace(settings, answer_seconds=PATIENCE_SECONDS)


def check_declared(response: Any) -> None:
    """Fail if the OpenAPI document has the route of a response, and not its status. Faults are made by tests alone."""
    for pattern, statuses in _declared():
        if re.fullmatch(pattern, f"{response.request.method} {response.request.url.path}"):
            assert response.status_code in {*statuses, 500}, f"{response.status_code} of {pattern} is not declared"


@cache
def described() -> dict[str, Any]:
    """The OpenAPI document."""
    return create_app(ServiceSettings("sqlite://")).openapi()


@cache
def _declared() -> list[tuple[str, set[int]]]:
    return [
        (re.sub(r"\{\w+\}", "[^/]+", f"{method.upper()} {path}"), set(map(int, operation["responses"])))
        for path, item in described()["paths"].items()
        for method, operation in item.items()
    ]


def start(settings: ServiceSettings) -> Served:
    """Serve until `stop` is called."""
    ready = threading.Event()
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = create_app(_patient(settings))
    protocol = guarded_protocol(ConnectionLimits(settings.max_connections, settings.header_seconds))
    config = uvicorn.Config(
        app,
        http=protocol,
        backlog=BACKLOG,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_SECONDS,
        proxy_headers=False,
    )
    server = Server(config, app, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    assert ready.wait(PATIENCE_SECONDS)
    return Served(url, server, thread)
