"""How a trial ends whose process does not finish it."""

from __future__ import annotations

import signal
from typing import Any
from unittest.mock import Mock

import pytest

from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.workers.process.protocol import RankLost, Reply, TrialFinished
from bexp.workers.process.trial_run import CommandRun, TrialRun
from tests.contracts.samples import make_candidate, make_request


def follow(reply: Reply, exit_status: int = 0) -> tuple[TrialRun, Measurement]:
    """Run a trial whose process says `reply` and then ends with a status."""
    process = Mock(**{"receive.return_value": reply})
    process.last_output.return_value = ""
    fields: dict[str, Any] = {"model": make_request().model, "candidate": make_candidate(1)}
    command = CommandRun(
        process, allowed_seconds=60.0, ceiling=None, replace=lambda _: exit_status, check_interrupted=lambda: None
    )
    run = TrialRun(command, TrialTask(number=0, kind=TrialKind.COMPONENTS, timeout_seconds=60.0, **fields))
    return run, run.follow()[0]


@pytest.mark.parametrize("killed", [True, False])
def test_a_custom_targets_killed_process_counts_as_the_profilers_own(killed: bool) -> None:
    crashed = Measurement(candidate=make_candidate(1), outcome=Outcome.CRASHED, reason="killed")
    run, measurement = follow(TrialFinished(measurement=crashed, seconds=1.0, target_killed=killed))
    assert (run.was_killed, measurement) == (killed, crashed)


@pytest.mark.parametrize(("status", "unexplained"), [(-signal.SIGKILL, True), (-signal.SIGSEGV, False), (1, False)])
def test_the_end_of_the_lost_rank_decides_and_not_that_of_its_group(status: int, unexplained: bool) -> None:
    lost = RankLost(rank=1, device="cuda:1", status=status)
    run, measurement = follow(lost, 1 if unexplained else -signal.SIGKILL)
    assert measurement.outcome is Outcome.CRASHED
    assert "rank 1 (cuda:1)" in str(measurement.reason)
    assert run.was_killed is unexplained
