"""The settings of the API. Only this module of the API reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bexp.api.peers import Proxy
from bexp.storage.location import default_database_url

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8642
MAX_WAIT_HOURS = 7 * 24.0
DEFAULT_TOKEN_RATE = 50.0
DEFAULT_ADDRESS_RATE = 100.0
DEFAULT_TOKEN_STREAMS = 500


@dataclass(frozen=True, slots=True)
class Environment:
    """The variables that bexp reads: BEXP_DATABASE_URL, BEXP_API_URL, BEXP_API_TOKEN, BEXP_HOST, BEXP_PORT."""

    database_url: str
    api_url: str | None
    api_token: str | None
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a listener on its clients."""

    max_body_bytes: int = 256 * 1024
    max_connections: int = 4096
    header_seconds: float = 10.0
    """The time in which a client must send the header of a request."""
    body_seconds: float = 10.0
    """The time in which a client must send the body of a request."""
    answer_seconds: float = 4.5
    """The time in which a response must start."""
    token_rate: float = DEFAULT_TOKEN_RATE
    """Requests a second with one token; 0 is no limit."""
    address_rate: float = DEFAULT_ADDRESS_RATE
    """Requests a second of an address without a known token, where one is sent or required; 0 is no limit."""
    token_streams: int = DEFAULT_TOKEN_STREAMS
    """Streams and calls that wait, open at once with one token; 0 is no limit."""

    @property
    def max_streams(self) -> int:
        """The streams that all tokens may have open at once; a quarter of the connections is left to other requests."""
        return 3 * self.max_connections // 4


@dataclass(frozen=True, slots=True)
class ServiceSettings(Limits):
    """The settings of one application."""

    database_url: str
    require_token: bool = False
    """Ask for a bearer token on every route but the health checks. Without it, the application answers only requests
    that name a loopback host, so that no web page can reach it by rebinding its own name.
    """
    is_open: bool = False
    """Serve other users of this machine without a token."""
    trusted_proxies: tuple[Proxy, ...] = ()
    """The proxies whose word on the origin of a request counts."""
    max_wait_seconds: float = 3600 * MAX_WAIT_HOURS
    """A job that no live worker can run fails after this time."""
    keep_days: float | None = None
    """Finished jobs are deleted after this time; None: never."""
    keep_jobs: int | None = None
    """The oldest finished jobs beyond this number are deleted; None: all stay."""
    poll_seconds: float = 0.2
    keep_alive_seconds: float = 15.0
    token_check_seconds: float = 2.0
    """A token is looked up again after this time, so a revoked token works no longer than that."""
    waiting_check_seconds: float = 2.0
    log_dir: Path | None = None
    """The folder for the log files of all explorations; None: logs stay in the database alone."""

    @property
    def keeps_all(self) -> bool:
        """Whether finished jobs stay until somebody deletes them."""
        return self.keep_days is None and self.keep_jobs is None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read `variables` (default: the process's); an empty one counts as not set.

    Raises ValueError if BEXP_PORT is not a port, or if a header cannot carry BEXP_API_TOKEN.
    """
    given = {key: value for key, value in (os.environ if variables is None else variables).items() if value}
    port = given.get("BEXP_PORT", str(DEFAULT_PORT))
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError("BEXP_PORT must be a number from 0 to 65535")
    token = given.get("BEXP_API_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError("BEXP_API_TOKEN must be one line of printable ASCII, as `bexp token create` prints it")
    return Environment(
        database_url=given.get("BEXP_DATABASE_URL") or default_database_url(given.get("XDG_DATA_HOME", "")),
        api_url=given.get("BEXP_API_URL"),
        api_token=token or None,
        host=given.get("BEXP_HOST", DEFAULT_HOST),
        port=int(port),
    )
