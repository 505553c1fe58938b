"""Runs the API under uvicorn."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from bexp.api.app import create_app
from bexp.api.connections import BACKLOG, QUEUED, ConnectionLimits, allow_connections, guarded_protocol
from bexp.api.settings import ServiceSettings
from bexp.client.address import is_loopback
from bexp.storage.database import open_database
from bexp.storage.schema import upgrade
from bexp.storage.tokens import list_tokens

LINES_PER_SECOND = 10.0
BURST = 50
MAX_LINE = 2000
_FRAMES = 6
_LOGGERS = ("uvicorn", "asyncio", "bexp")


class OneLineFormatter(logging.Formatter):
    """Writes an exception as its type, its message and its innermost frames, all in the record's line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            where = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
            line += f": {type(error).__name__}: {error} [{where}]"
        return " ".join(line.split())[:MAX_LINE]


class RateFilter(logging.Filter):
    """Drops records beyond a rate, and says in the next one how many were dropped."""

    def __init__(
        self,
        per_second: float = LINES_PER_SECOND,
        burst: int = BURST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._filled_at = clock()
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._tokens < 1:
            self._dropped += 1
            return False
        self._tokens -= 1
        if self._dropped:
            record.msg = f"{record.getMessage()} ({self._dropped} lines before this one were left out)"
            record.args = None
            self._dropped = 0
        return True


def log_config() -> dict[str, Any]:
    """Return the configuration of `logging` for a process that serves."""
    loggers = {name: {"handlers": ["stderr"], "level": "WARNING", "propagate": False} for name in _LOGGERS}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"rate": {"()": RateFilter}},
        "formatters": {"line": {"()": OneLineFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["rate"]}},
        "loggers": loggers,
    }


SHUTDOWN_SECONDS = 5
SWITCH_SECONDS = 0.0005
"""How long the thread that serves connections waits for another one that computes, each time it has read or sent."""

HOW_TO_ADMIT = "The service asks for a token, and there is none yet: create one with `bexp token create NAME`."


class ServeError(Exception):
    """The service cannot start, for a reason that the user can change."""


def serve(
    settings: ServiceSettings,
    host: str,
    port: int,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    notify: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True),  # noqa: T201 - the default for a command, where standard error is the log
) -> None:
    """Serve until SIGINT or SIGTERM, on a database whose schema is brought up to date first.

    Args:
        settings: how to serve. Tokens are always required if `host` is not a loopback address, or behind a proxy.
        host: name or address to bind to.
        port: 0 for any free port.
        on_ready: called with the URL once requests are answered.
        notify: called with messages for the person who started the service.

    Raises:
        ServeError: the address is in use, or is not an address of this machine.
        ValueError: the database's URL is malformed.
    """
    if not is_loopback(host) or settings.trusted_proxies:
        settings = replace(settings, require_token=True)
    with bind(host, port) as listener:
        _prepare(settings, notify)
        url = _url(host, listener.getsockname()[1])
        serve_on(listener, settings, on_ready=lambda: on_ready(url))


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to `host` and `port` (0: any free port) and does not listen yet.

    Raises:
        ServeError: the address is in use, or is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is too long for a host
        raise ServeError(f"cannot listen on {host}: {getattr(error, 'strerror', None) or 'not a host'}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def serve_on(listener: socket.socket, settings: ServiceSettings, *, on_ready: Callable[[], None]) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM; open streams are then ended."""
    settings = replace(settings, max_connections=allow_connections(settings.max_connections))
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        http=guarded_protocol(
            ConnectionLimits(settings.max_connections, settings.header_seconds),
        ),
        ws="none",
        backlog=BACKLOG,
        log_config=log_config(),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # `authorize` reads them
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    gc.collect()
    gc.freeze()  # else each full collection goes through all that was imported, and holds all requests up for 0.1 s
    sys.setswitchinterval(SWITCH_SECONDS)
    Server(config, app, on_ready).run(sockets=[listener])


class Server(uvicorn.Server):
    """A uvicorn server that reports when it is ready, and that ends open streams when it shuts down."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, on_ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._app = app
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `on_ready`."""
        await super().startup(sockets)
        if self.started:
            for listener in sockets or ():
                listener.listen(QUEUED)  # uvicorn has one number for this and for how many are accepted at once
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the open streams, then shut down, because uvicorn waits for all responses to end."""
        self._app.state.service.feed.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop without raising the signal again, as uvicorn does: a service that is told to end has not failed."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def _prepare(settings: ServiceSettings, notify: Callable[[str], None]) -> None:
    database = open_database(settings.database_url)
    try:
        upgrade(database)
        if settings.require_token and not list_tokens(database):
            notify(HOW_TO_ADMIT)
    finally:
        database.dispose()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
