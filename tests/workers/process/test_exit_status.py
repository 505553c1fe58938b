from __future__ import annotations

import signal

import pytest

from bexp.explorer.records.measurement import Outcome
from bexp.workers.process.exit_status import classify_exit, describe_status, is_unexplained, name_ended
from bexp.workers.process.protocol import RankLost


@pytest.mark.parametrize(
    ("status", "words"), [(3, "exited with status 3"), (-11, "was killed by SIGSEGV"), (-99, "was killed by signal 99")]
)
def test_an_exit_status_is_described_in_words(status: int, words: str) -> None:
    assert describe_status(status) == words


@pytest.mark.parametrize(
    ("status", "output", "kernel_killed", "outcome", "unexplained"),
    [
        (-signal.SIGKILL, "", True, Outcome.OUT_OF_MEMORY, False),
        (-signal.SIGKILL, "", False, Outcome.CRASHED, True),
        (-signal.SIGTERM, "", False, Outcome.CRASHED, True),
        (-signal.SIGKILL, "UserWarning: slow", False, Outcome.CRASHED, True),
        (-signal.SIGKILL, "CUDA error: an illegal memory access", False, Outcome.CRASHED, False),
        (-signal.SIGKILL, "CUDA out of memory", False, Outcome.OUT_OF_MEMORY, False),
        (-signal.SIGABRT, "terminate called: std::bad_alloc", False, Outcome.OUT_OF_MEMORY, False),
        (1, "RuntimeError: Cannot allocate memory", False, Outcome.OUT_OF_MEMORY, False),
        (1, "DefaultCPUAllocator: not enough memory: you tried to allocate 9", False, Outcome.OUT_OF_MEMORY, False),
        (-signal.SIGSEGV, "Fatal Python error", True, Outcome.CRASHED, False),
    ],
)
def test_the_end_of_a_process_is_the_outcome_of_its_trial(
    status: int, output: str, kernel_killed: bool, outcome: Outcome, unexplained: bool
) -> None:
    found, reason = classify_exit("the profiler process", status, output, kernel_killed)
    assert found is outcome
    assert is_unexplained(status, found, output) is unexplained
    assert reason.startswith(f"the profiler process {describe_status(status)}")
    assert output in reason


def test_a_lost_rank_ended_before_its_group() -> None:
    assert name_ended(-9, None) == ("the profiler process", -9)
    lost = RankLost(rank=1, device="cuda:1", status=-11)
    assert name_ended(-9, lost) == ("rank 1 (cuda:1)", -11)
