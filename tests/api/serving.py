"""An application on a port, in a thread; and one that is called in process."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fastapi.testclient import TestClient

from bexp.api.app import create_app
from bexp.api.listener import Server, bind, url_of
from bexp.api.peers import Peer
from bexp.api.serve import end_streams
from bexp.api.settings import Limits, ServiceSettings
from tests.waits import PATIENCE_SECONDS

GRACE_SECONDS = 100
"""How long a service that is told to stop waits for its clients. Far more than any test needs."""


@dataclass
class Served:
    """An application on a port."""

    url: str
    app: Any
    server: Server
    thread: threading.Thread

    @property
    def num_watchers(self) -> int:
        number: int = self.app.state.service.feed.num_watchers
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
    """Serve the API until `stop` is called."""
    settings = _patient(settings)
    return start_app(create_app(settings), settings, end_streams)


def start_app(
    app: Any, limits: Limits, end: Callable[[Any], None] = lambda app: None, *, host: str = "127.0.0.1"
) -> Served:
    """Serve an application until `stop` is called."""
    ready = threading.Event()
    listener = bind(host, 0)
    server = Server(app, limits, on_ready=ready.set, on_shutdown=lambda: end(app), shutdown_seconds=GRACE_SECONDS)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    assert ready.wait(PATIENCE_SECONDS)
    return Served(url_of(host, listener), app, server, thread)
