"""Profilers of this process that have torch when they begin, for tests of what comes after their start.

Such a test is marked `slow(together="forked")`: the tests with this mark share one process that forks.
`tests/workers/process/test_profiler_start.py`, `test_group_process.py` and `tests/acceptance` start real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.chaos.fork_server import ForkedProcess
from tests.chaos.forked_profilers import fork_profiler, profilers_started_by
from tests.forked_ranks import fork_server


@contextmanager
def forked_profilers() -> Iterator[None]:
    """Have the profilers of this process fork theirs, ranks included. They have torch then, which takes seconds."""
    doubles = {"bexp.workers.profiler.distributed": "tests.forked_group"}

    def start(command: Sequence[str], **options: Any) -> ForkedProcess:
        return fork_profiler(fork_server(), [doubles.get(word, word) for word in command], **options)

    with profilers_started_by(start):
        yield
