"""Limits on the requests a second of a token or an address, and on open responses that last.

The `limits` package was looked at: it counts requests in windows, has no burst apart from its rate, and starts a timer
thread for its memory. Here one number for each key does.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from bexp.api.refusals import ProblemException

BURST_SECONDS = 4.0
MAX_KEYS = 20_000


class RateLimiter:
    """Admits `rate` requests a second for each key, in bursts of up to BURST_SECONDS. A rate of 0 admits all.

    It is the generic cell rate algorithm (ITU-T I.371): for each key it keeps the time at which its bucket is empty.
    """

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._clock = clock
        self._empty_at: dict[str, float] = {}

    def wait_seconds(self, key: str) -> float:
        """Count a request and return 0 if it is admitted; else return the seconds until one will be."""
        if not self.rate:
            return 0.0
        now = self._clock()
        level = max(0.0, self._empty_at.pop(key, now) - now) + 1 / self.rate
        too_much = level - max(BURST_SECONDS, 1 / self.rate)
        self._empty_at[key] = now + level - (1 / self.rate if too_much > 0 else 0.0)
        if len(self._empty_at) > MAX_KEYS:  # the key that has been silent for longest
            del self._empty_at[next(iter(self._empty_at))]
        return max(0.0, too_much)


def limit_rate(limiter: RateLimiter, key: str, what: str) -> None:
    """Count a request of a key. `what` says in the refusal whether the key is an address or a token.

    Raises:
        ProblemException: 429 if the key has sent too many.
    """
    if wait := limiter.wait_seconds(key):
        raise ProblemException(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"This {what} has sent more than {limiter.rate:g} requests a second.",
            name="rate-limited",
            headers={"Retry-After": str(math.ceil(wait))},
        )


def address_key(address: str | None) -> str:
    """Return the key of an address. Of an IPv6 address it is the network of 64 bits, which one host has to itself."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return address or "unknown"
    if parsed.version == 4:
        return str(parsed)
    return str(ipaddress.ip_network((int(parsed), 64), strict=False))


RETRY_SECONDS = 10


class StreamLimits:
    """Counts open responses: at most `per_token` of each token (0: no such limit) and `total` together.

    `what` names them in a refusal. A stream counts from its first byte on, so requests that arrive in the same moment
    may exceed a limit by a few.
    """

    def __init__(self, *, per_token: int, total: int, what: str = "streams") -> None:
        self._what = what
        self._per_token = per_token
        self._total = total
        self._open: Counter[str | None] = Counter()

    def check(self, token: str | None) -> None:
        """Check that one more response may begin. `token` is the name of its token, if it has one.

        Raises:
            ProblemException: 429 if the token has too many, 503 if the service has.
        """
        if token is not None and self._per_token and self._open[token] >= self._per_token:
            status, detail = HTTPStatus.TOO_MANY_REQUESTS, f"This token has {self._per_token} open {self._what}."
        elif self._open.total() >= self._total:
            status, detail = HTTPStatus.SERVICE_UNAVAILABLE, f"The service has {self._total} open {self._what}."
        else:
            return
        headers = {"Retry-After": str(RETRY_SECONDS)}
        raise ProblemException(status, f"{detail} It allows no more.", name="too-many-streams", headers=headers)

    def num_open(self, token: str | None) -> int:
        """Return the number of open responses of a token, or of those without one."""
        return self._open[token]

    @contextmanager
    def count(self, token: str | None) -> Iterator[None]:
        """Count a response while it is open."""
        self._open[token] += 1
        try:
            yield
        finally:
            self._open -= Counter([token])  # which leaves out what is 0
