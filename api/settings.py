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
    """What a listener grants its clients.

    `header_seconds` and `body_seconds` limit how long a client may take to send them, `answer_seconds` how long the
    start of a response may take. `token_rate` limits the requests a second with one token, `address_rate` those of an
    address without a token that is known, where one is sent or required; `token_streams` limits what one token may have
    open at once of streams, and of calls that wait; 0 is no limit. All of these together leave a quarter of
    `max_connections` to other requests.
    """

    max_body_bytes: int = 256 * 1024
    max_connections: int = 4096
    header_seconds: float = 10.0
    body_seconds: float = 10.0
    answer_seconds: float = 4.5
    token_rate: float = DEFAULT_TOKEN_RATE
    address_rate: float = DEFAULT_ADDRESS_RATE
    token_streams: int = DEFAULT_TOKEN_STREAMS

    @property
    def max_streams(self) -> int:
        """How many streams may be open at once, those of all tokens."""
        return 3 * self.max_connections // 4


@dataclass(frozen=True, slots=True)
class ServiceSettings(Limits):
    """How one application serves.

    `require_token` asks for a bearer token on every route but the health checks. Without it the application answers
    only requests that name a loopback host, so that no web page can reach it by rebinding its own name, and it asks
    other users of this machine for a token unless it `is_open`. `trusted_proxies` may say whose requests they
    forward. A job that no live worker can run fails after `max_wait_seconds`. Finished jobs are deleted after
    `keep_days`, and the oldest beyond `keep_jobs`; None: all stay. A token is looked up again after
    `token_check_seconds`, so a revoked one works no longer than that. The logs of all explorations are kept in files
    below `log_dir`; None: in the database alone.
    """

    database_url: str
    require_token: bool = False
    is_open: bool = False
    trusted_proxies: tuple[Proxy, ...] = ()
    max_wait_seconds: float = 3600 * MAX_WAIT_HOURS
    keep_days: float | None = None
    keep_jobs: int | None = None
    poll_seconds: float = 0.2
    keep_alive_seconds: float = 15.0
    token_check_seconds: float = 2.0
    waiting_check_seconds: float = 2.0
    log_dir: Path | None = None

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
