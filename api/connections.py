"""Limits on open connections, how many there are and how long one may take to send a request's header; and their peers.

uvicorn has neither limit. Without them, clients that open connections and send nothing use up the file descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from bexp.api.peers import find_peer

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
        """Take a connection, and close another if there are too many."""
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
