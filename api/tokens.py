"""The tokens of requests and of open streams, checked against the database every few seconds and not every time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError

from bexp.api.streams import EventFeed
from bexp.storage.database import Database
from bexp.storage.tokens import Token, digest_of, find_revoked, verify_token

MAX_KEPT = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    token: Token
    at: float


@dataclass(eq=False, slots=True)
class OpenStream:
    """A stream of a job's events that is open under a token."""

    digest: str
    job_id: str
    may_continue: bool = True


class Tokens:
    """Looks tokens up and remembers each for `check_seconds`. `run` ends the streams of tokens that are gone.

    A revoked token is refused, and its streams end, after at most `check_seconds` and the time of the look-up.
    """

    def __init__(self, database: Database, feed: EventFeed, *, check_seconds: float) -> None:
        self._database = database
        self._feed = feed
        self._check_seconds = check_seconds
        self._known: dict[str, _Known] = {}
        self._streams: set[OpenStream] = set()

    def remembered(self, secret: str) -> Token | None:
        """Return the token with this secret if it was looked up lately."""
        known = self._known.get(digest_of(secret))
        return known.token if known is not None and time.monotonic() - known.at < self._check_seconds else None

    async def find(self, secret: str) -> Token | None:
        """Return the token with this secret, or None. A token that has expired is returned as well.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database does not answer, and the token was not looked up lately.
        """
        if (known := self.remembered(secret)) is not None:
            return known
        digest = digest_of(secret)
        self._known.pop(digest, None)
        token = await run_sync(verify_token, self._database, secret)
        if token is not None:
            self._known[digest] = _Known(token, time.monotonic())
            if len(self._known) > MAX_KEPT:
                del self._known[next(iter(self._known))]
        return token

    @contextmanager
    def stream(self, secret: str | None, job_id: str) -> Iterator[Callable[[], bool]]:
        """Enter a stream; yield a function that returns whether it may go on. A stream without a token always may."""
        if secret is None:
            yield lambda: True
            return
        stream = OpenStream(digest_of(secret), job_id)
        self._streams.add(stream)
        try:
            yield lambda: stream.may_continue
        finally:
            self._streams.discard(stream)

    async def run(self, beat: Callable[[], None]) -> None:
        """End the streams of revoked and expired tokens until cancelled; call `beat` after each successful round."""
        while True:
            await asyncio.sleep(self._check_seconds)
            digests = {stream.digest for stream in self._streams}
            try:
                gone = await run_sync(find_revoked, self._database, digests) if digests else set()
                beat()
            except SQLAlchemyError as error:
                logger.warning("the database does not answer: %s", getattr(error, "orig", error))
                continue
            ended = [stream for stream in self._streams if stream.digest in gone]
            for stream in ended:
                stream.may_continue = False
            self._feed.wake({stream.job_id for stream in ended})
