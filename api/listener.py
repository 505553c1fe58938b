"""The only way to listen on a port. Whatever application it is for, its clients have the same limits."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from logging.config import dictConfig
from types import FrameType
from typing import TypeVar

import uvicorn
from starlette.types import ASGIApp

from bexp.api.connections import BACKLOG, QUEUED, ConnectionLimits, allow_connections, guarded_protocol
from bexp.api.process_log import log_config
from bexp.api.settings import Limits

SHUTDOWN_SECONDS = 5
SWITCH_SECONDS = 0.0005
"""How long the thread that serves connections waits for another one that computes, each time it has read or sent."""

A = TypeVar("A", bound=ASGIApp)
L = TypeVar("L", bound=Limits)


class ListenError(Exception):
    """The port cannot be listened on, for a reason that the user can change."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to `host` and `port` (0: any free port) and does not listen yet.

    Raises:
        ListenError: the address is in use, or is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is too long for a host
        raise ListenError(f"cannot listen on {host}: {getattr(error, 'strerror', None) or 'not a host'}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    """Return the URL of a socket that is bound to `host`."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(
    listener: socket.socket,
    limits: L,
    create_app: Callable[[L], A],
    *,
    on_ready: Callable[[], None],
    end_streams: Callable[[A], None] = lambda app: None,
) -> None:
    """Serve an application on a bound socket until SIGINT or SIGTERM.

    Args:
        listener: from `bind`.
        limits: what clients are granted; `create_app` gets them with as many connections as open files allow.
        create_app: makes the application.
        on_ready: called once requests are answered.
        end_streams: called when the server shuts down, before it waits for the responses that have begun.
    """
    dictConfig(log_config())
    limits = replace(limits, max_connections=allow_connections(limits.max_connections))
    app = create_app(limits)
    gc.collect()
    gc.freeze()  # else each full collection goes through all that was imported, and holds all requests up for 0.1 s
    sys.setswitchinterval(SWITCH_SECONDS)
    Server(app, limits, on_ready=on_ready, on_shutdown=lambda: end_streams(app)).run(sockets=[listener])


class Server(uvicorn.Server):
    """A uvicorn server with limits, which says when it is ready and when it shuts down."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_shutdown: Callable[[], None] = lambda: None,
        shutdown_seconds: int = SHUTDOWN_SECONDS,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded_protocol(ConnectionLimits(limits.max_connections, limits.header_seconds)),
                ws="none",
                backlog=BACKLOG,
                log_config=None,  # `listen` has configured the log
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # who needs them reads them, and knows which proxies are trusted
                timeout_graceful_shutdown=shutdown_seconds,
            )
        )
        self._on_ready = on_ready
        self._on_shutdown = on_shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `on_ready`."""
        await super().startup(sockets)
        if self.started:
            for listener in sockets or ():
                listener.listen(QUEUED)  # uvicorn has one number for this and for how many are accepted at once
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Call `on_shutdown`, then shut down, because uvicorn waits for all responses to end."""
        self._on_shutdown()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop without raising the signal again, as uvicorn does: a service that is told to end has not failed."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
