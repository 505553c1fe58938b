"""The order in which threads get a turn to write."""

from __future__ import annotations

import threading
import time

from bexp.storage.database import WriterTurns
from tests.waits import PATIENCE_SECONDS


def _start_waiting(turns: WriterTurns, served: list[int], number: int) -> threading.Thread:
    """Start a thread that waits for a turn, and return it once it waits."""

    def wait() -> None:
        assert turns.acquire(PATIENCE_SECONDS)
        served.append(number)
        turns.release()

    before = turns.num_waiting
    thread = threading.Thread(target=wait)
    thread.start()
    while turns.num_waiting == before:
        time.sleep(0.001)
    return thread


def test_threads_get_their_turn_in_the_order_in_which_they_asked() -> None:
    turns = WriterTurns()
    served: list[int] = []
    assert turns.acquire(0)
    threads = [_start_waiting(turns, served, number) for number in range(6)]
    turns.release()
    assert turns.acquire(PATIENCE_SECONDS)  # behind all of them, although this thread has just had a turn
    assert served == list(range(6))
    for thread in threads:
        thread.join()


def test_a_thread_that_waits_for_too_long_leaves_the_queue_to_the_others() -> None:
    turns = WriterTurns()
    served: list[int] = []
    assert turns.acquire(0)
    assert not turns.acquire(0.01)
    thread = _start_waiting(turns, served, 1)
    turns.release()
    thread.join()
    assert served == [1]
    assert turns.num_waiting == 0
    assert turns.acquire(0)
