"""Attempts at a step, and what they leave of their caller's."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from bexp.explorer.records.measurement import Outcome
from bexp.step.agreement import attempt
from tests.waits import PATIENCE_SECONDS, wait_until


@pytest.fixture
def rung() -> Iterator[list[float]]:
    """When the caller's timer went off. The timer of the test runner goes on afterwards."""
    found: list[float] = []
    others = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, lambda *_: found.append(time.monotonic()))
    yield found
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *others)


@pytest.mark.parametrize("deadline", [PATIENCE_SECONDS, 0.05])
def test_a_timer_of_the_caller_goes_on_with_what_is_left_of_it(rung: list[float], deadline: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, 2 * PATIENCE_SECONDS, 7.0)
    failed = attempt(lambda: time.sleep(0.2), deadline)
    assert (failed.outcome if failed else None) == (Outcome.TIMED_OUT if deadline < 0.2 else None)
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert PATIENCE_SECONDS < left < 2 * PATIENCE_SECONDS - min(deadline, 0.2) + 0.01 and interval == 7.0 and not rung


def test_a_timer_that_is_over_when_the_step_ends_goes_off_at_once(rung: list[float]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert attempt(lambda: time.sleep(0.1), PATIENCE_SECONDS) is None
    wait_until(lambda: rung)
    assert len(rung) == 1


def test_no_timer_is_left_where_there_was_none(rung: list[float]) -> None:
    assert attempt(lambda: None, PATIENCE_SECONDS) is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and not rung
