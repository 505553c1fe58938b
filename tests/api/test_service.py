"""How many streams may be open."""

from __future__ import annotations

import pytest

from bexp.api.refusals import ProblemException
from bexp.api.service import StreamLimits


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
        with limits.count("a"), pytest.raises(ProblemException, match="has 2 open streams"):
            limits.check("a")
    assert not limits._open, "a token that is gone takes no room"
