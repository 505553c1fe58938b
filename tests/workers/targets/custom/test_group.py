"""Trainings of two processes: their batch stays, the slowest and the fullest count, and one that breaks ends both."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest

from bexp.explorer.records.measurement import Outcome
from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.targets.custom.command import CommandProcess
from bexp.workers.targets.custom.group_end import cause_of
from bexp.workers.targets.custom.training_command import TrainingCommand
from tests.forked_trainings import SCRIPTS, TORCHRUN
from tests.waits import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow(together="trainings"), pytest.mark.usefixtures("forked_trainings")]

SIZES = ("--batch", "{micro_batch_size}", "--accumulate", "{grad_accum_steps}")


class Training(CommandProcess):
    """A command of two processes."""

    def __init__(self, folder: Path, loop: str, *given: str) -> None:
        launched = (sys.executable, *TORCHRUN, str(SCRIPTS / "with_ranks.py"))
        sizes = SIZES if loop == "plain" else ()
        batch_size = 8 if sizes else None
        arguments = (*launched, loop, *sizes, *given, "--output", str(folder / "out"))
        super().__init__(TrainingCommand(arguments, str(folder), {}, batch_size))
        self.ask("open", PATIENCE_SECONDS, device="cpu", choice=None)


def test_the_slowest_and_the_fullest_process_count_and_one_without_memory_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    faults = ("--slower", "0.1", "--fuller", "200", "--fault", "memory", "--fail-from", "4")
    training = Training(tmp_path, "accelerate", *faults)
    try:
        described = training.ask("describe", PATIENCE_SECONDS)
        figures = training.ask("measure", PATIENCE_SECONDS, micro_batch_size=2)
        assert training._hello["num_devices"] == 2
        with pytest.raises(TrialFailedError) as caught:
            training.ask("measure", PATIENCE_SECONDS, micro_batch_size=4)
    finally:
        training.end()
    spread = described["processes"]
    assert described["batch_size"] == 8, "of each device"
    assert (spread["number"], spread["slowest"], spread["fullest"]) == (2, 1, 1)
    assert spread["slower"] > 1.5, "the other one takes a few ms, and waits in each second micro-step"
    assert spread["fuller"] > 1.3
    assert figures["micro_step_seconds"] > 0.1
    assert figures["peak_bytes"] > 500 * 2**20
    assert (caught.value.outcome, str(caught.value)) == (Outcome.OUT_OF_MEMORY, "rank 1: MemoryError: out of memory")
    assert str(tmp_path) not in [process.info["cwd"] for process in psutil.process_iter(["cwd"])], "none is left"
    assert not (tmp_path / "out").exists()


def test_a_process_that_cannot_say_why_it_ended_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    training = Training(tmp_path, "plain", "--fault", "crash", "--fail-from", "1")
    try:
        with pytest.raises(TrialFailedError) as caught:
            training.ask("describe", PATIENCE_SECONDS)
    finally:
        training.end()
    assert caught.value.outcome is Outcome.CRASHED
    assert re.fullmatch(r"rank 1 (exited with status 1|ended first): the data is corrupt", str(caught.value))


def test_a_process_that_has_lost_the_one_that_ended_first_is_not_the_cause(tmp_path: Path) -> None:
    """torchrun notices the end of the first only after that of the second."""
    lost = {"rank": 0, "outcome": "crashed", "reason": "RuntimeError: Connection closed by peer [127.0.0.1]:12433"}
    (tmp_path / "socket.failed-0").write_text(json.dumps(lost))
    output = ["the data is corrupt", "[rank0]: RuntimeError: ...", "terminate called without an active exception"]
    output += ["W1126 Sending process 18089 closing signal SIGTERM"]
    output += ["Failures:", "  rank      : 1 (local_rank: 1)", "  exitcode  : -15 (pid: 18089)  (SIGTERM)"]
    output += [
        "Root Cause (first observed failure):",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : -6 (pid: 18088)",
    ]
    expected = (Outcome.CRASHED, "rank 1 ended first: the data is corrupt")
    assert cause_of(tmp_path, output, kernel_killed=False) == expected


def test_the_kernel_that_ends_a_process_lacks_memory(tmp_path: Path) -> None:
    output = ["W1126 ending", "Root Cause (first observed failure):", "  rank : 1 (local_rank: 1)", "  exitcode : -9"]
    assert cause_of(tmp_path, output, kernel_killed=False) == (Outcome.CRASHED, "rank 1 was killed by SIGKILL")
    outcome, reason = cause_of(tmp_path, output, kernel_killed=True) or ("", "")
    assert outcome is Outcome.OUT_OF_MEMORY
    assert "the kernel's out-of-memory killer ended it" in reason
