"""How many streams may be open, and what a process does now and then."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import psutil
import pytest
from sqlalchemy.exc import OperationalError

from bexp.api import service
from bexp.api.rate_limits import StreamLimits
from bexp.api.refusals import ProblemException
from bexp.api.service import WriteProbe, keep_trimmed
from bexp.storage.database import Database
from tests.waits import PATIENCE_SECONDS


def test_streams_count_while_they_are_open() -> None:
    limits = StreamLimits(per_token=2, total=3)

    def status_of(token: str | None) -> int | None:
        try:
            limits.check(token)
        except ProblemException as refused:
            return refused.status
        return None

    with limits.count("a"):
        with limits.count("a"):
            assert (status_of("a"), status_of("b"), status_of(None)) == (429, None, None)
            with limits.count(None):
                assert (status_of("a"), status_of("b"), status_of(None)) == (429, 503, 503)
        assert status_of("a") is None
        with limits.count("a"), pytest.raises(ProblemException, match="has 2 open streams") as refused:
            limits.check("a")
        assert refused.value.headers == {"Retry-After": "10"}
    assert not limits._open, "a token that is gone takes no room"


def test_a_write_is_tried_once_a_second_and_again_after_it_failed(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tried = SimpleNamespace(seconds=0.0), list[float]()

    def try_write(database: Database) -> None:
        assert database is sqlite_database
        tried.append(now.seconds)
        if now.seconds == 3:
            raise OperationalError("INSERT", {}, Exception("it is away"))

    monkeypatch.setattr(service, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(service, "try_write", try_write)
    probe = WriteProbe(sqlite_database)
    failed = []
    for now.seconds in (0.5, 1.0, 1.5, 1.75, 3.0, 3.25, 4.25):
        try:
            probe.check()
        except OperationalError:
            failed.append(now.seconds)
    assert (tried, failed) == ([0.5, 1.75, 3.0, 4.25], [3.0, 3.25])


def test_memory_is_given_back_every_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, beats = list[float](), list[None]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(service, "trim", lambda: None)
    monkeypatch.setattr(service, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(keep_trimmed(lambda: beats.append(None)))
    assert (pauses, len(beats)) == ([30, 30], 2)


PIECE_BYTES, NUM_PIECES = 1 << 16, 1000
"""Pieces for the heap, and larger than most holes that other tests have left there: their edges are resident."""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of other systems is not told to")
def test_the_pages_of_freed_pieces_go_back() -> None:
    process = psutil.Process()
    pieces = [b"-" * PIECE_BYTES for _ in range(NUM_PIECES)]
    kept = pieces[::100]  # scattered, so that the heap cannot shrink from its end
    pieces.clear()
    before = process.memory_info().rss

    async def trim_once() -> None:
        trimmed = asyncio.Event()
        task = asyncio.create_task(keep_trimmed(trimmed.set))
        await asyncio.wait_for(trimmed.wait(), PATIENCE_SECONDS)
        task.cancel()

    asyncio.run(trim_once())
    assert before - process.memory_info().rss > PIECE_BYTES * NUM_PIECES / 2
    assert len(kept) == NUM_PIECES / 100
