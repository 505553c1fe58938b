"""The only way to listen on a port, with the same limits on clients for each application."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from logging.config import dictConfig
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from bexp.api.peers import find_peer
from bexp.api.settings import Limits

SHUTDOWN_SECONDS = 5
SWITCH_SECONDS = 0.0005
"""The wait of the thread that serves connections for a thread that computes, after each read or write."""

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
        limits: of clients; `create_app` gets them with as many connections as open files allow.
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
        """Stop without raising the signal again, which uvicorn would: a service that a signal ends has not failed."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


BACKLOG = 32
"""Connections that are accepted at once, before the first of them is refused."""
QUEUED = 1024
"""Connections that wait in the kernel. A client whose connection comes beyond tries again after a second."""

_SPARE_FILES = 128 + 4 * BACKLOG  # the event loop accepts more before those that are too many are closed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`header_seconds` is the time from the start of a connection, or from the last response, to the next header."""

    max_connections: int
    header_seconds: float


def allow_connections(wanted: int) -> int:
    """Raise this process's limit on open files as far as `wanted` connections need it; return how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - _SPARE_FILES)
    return max(16, allowed)


def guarded_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return the protocol of one server's connections, for `uvicorn.Config(http=...)`."""
    waiting: dict[GuardedProtocol, None] = {}

    class Protocol(GuardedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(limits, waiting, *args, **kwargs)

    return Protocol


class GuardedProtocol(H11Protocol):
    """A connection that is closed if no header arrives in time, and its client does not read a response meanwhile.

    `waiting` holds the connections without a request, the oldest first. At the limit, the oldest of them makes room for
    a new one, so that idle connections keep nobody out. If all have a request, the new one is closed.

    The state of each request has the `peer` of its connection, which is looked up once.
    """

    def __init__(
        self, limits: ConnectionLimits, waiting: dict[GuardedProtocol, None], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._waiting = waiting
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Take a connection; if there are too many, close one."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            oldest = next(iter(self._waiting), self)
            logger.warning(
                "there are %d connections, which is the limit: %s is closed",
                self._limits.max_connections,
                "a new one" if oldest is self else "the one that has waited longest for a request",
            )
            oldest.end()
            if oldest is self:
                return
        self.app_state = {**self.app_state, "peer": find_peer(self.client, self.server)}
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the time for a header does not start again with them."""
        super().data_received(data)
        if self._has_request():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request after a response."""
        super().on_response_complete()
        if not self._has_request() and not self.transport.is_closing():
            self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection at once."""
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_header(self) -> None:
        self._stop_waiting()
        self._waiting[self] = None
        self._start_deadline()

    def _start_deadline(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(self._limits.header_seconds, self._end_unless_reading, unsent)

    def _end_unless_reading(self, unsent: int) -> None:
        """Close the connection, unless its client has read some of the `unsent` bytes of the last response."""
        if self.transport.get_write_buffer_size() < unsent:
            self._start_deadline()
        else:
            self.end()

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


LINES_PER_SECOND = 10.0
BURST = 50
MAX_LINE = 2000
_FRAMES = 6
_LOGGERS = ("uvicorn", "asyncio", "bexp", "mcp")


class OneLineFormatter(logging.Formatter):
    """Writes an exception in the record's line: its type, its message and its innermost frames."""

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
