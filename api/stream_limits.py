"""Limits on open responses that last: streams of events, and calls that wait for an exploration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from bexp.api.refusals import ProblemException

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
