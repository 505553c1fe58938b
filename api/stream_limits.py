"""How many streams of events may be open at once, so that they do not take the connections of all other requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from bexp.api.refusals import ProblemException

RETRY_SECONDS = 10


class StreamLimits:
    """Counts the open streams: at most `per_token` of each token (0: no such limit) and `total` together.

    A stream counts from its first byte on. Requests that arrive in the same moment may exceed a limit by a few.
    """

    def __init__(self, *, per_token: int, total: int) -> None:
        self._per_token = per_token
        self._total = total
        self._open: Counter[str | None] = Counter()

    def check(self, token: str | None) -> None:
        """Check that one more stream may begin. `token` is the name of its token, if it has one.

        Raises:
            ProblemException: 429 if the token has too many, 503 if the service has.
        """
        if token is not None and self._per_token and self._open[token] >= self._per_token:
            status, detail = HTTPStatus.TOO_MANY_REQUESTS, f"This token has {self._per_token} open streams."
        elif self._open.total() >= self._total:
            status, detail = HTTPStatus.SERVICE_UNAVAILABLE, f"The service has {self._total} open streams."
        else:
            return
        headers = {"Retry-After": str(RETRY_SECONDS)}
        raise ProblemException(status, f"{detail} It allows no more.", name="too-many-streams", headers=headers)

    @contextmanager
    def count(self, token: str | None) -> Iterator[None]:
        """Count a stream while it is open."""
        self._open[token] += 1
        try:
            yield
        finally:
            self._open[token] -= 1
            if not self._open[token]:
                del self._open[token]
