"""An application on a port, in a thread."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import uvicorn

from bexp.api.app import create_app
from bexp.api.connections import ConnectionLimits, guarded_protocol
from bexp.api.serve import Server, bind
from bexp.api.settings import ServiceSettings

GRACE_SECONDS = 10


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
        self.thread.join(2 * GRACE_SECONDS)
        assert not self.thread.is_alive()
        return time.monotonic() - start


def start(settings: ServiceSettings) -> Served:
    """Serve until `stop` is called."""
    ready = threading.Event()
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = create_app(settings)
    protocol = guarded_protocol(ConnectionLimits(settings.max_connections, settings.header_seconds))
    config = uvicorn.Config(app, http=protocol, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    server = Server(config, app, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    assert ready.wait(60)
    return Served(url, server, thread)
