"""How a trial ends whose process does not finish it."""

from __future__ import annotations

import signal
from typing import Any
from unittest.mock import Mock

import pytest

from explorer.records.measurement import Outcome
from explorer.records.trial import TrialKind, TrialPlan
from tests.contracts.samples import make_candidate, make_request
from workers.process.protocol import RankLost
from workers.process.trial_run import TrialRun


@pytest.mark.parametrize(("status", "unexplained"), [(-signal.SIGKILL, True), (-signal.SIGSEGV, False), (1, False)])
def test_the_end_of_the_lost_rank_decides_and_not_that_of_its_group(status: int, unexplained: bool) -> None:
    process = Mock(**{"receive.return_value": RankLost(rank=1, device="cuda:1", status=status)})
    process.last_output.return_value = ""
    fields: dict[str, Any] = {"model": make_request().model, "candidate": make_candidate(1)}
    plan = TrialPlan(number=0, kind=TrialKind.COMPONENTS, timeout_seconds=60.0, **fields)
    run = TrialRun(
        process,
        plan,
        allowed_seconds=60.0,
        ceiling=None,
        replace=lambda _: 1 if unexplained else -signal.SIGKILL,
        check_interrupted=lambda: None,
    )
    measurement, _ = run.follow()
    assert measurement.outcome is Outcome.CRASHED
    assert "rank 1 (cuda:1)" in str(measurement.reason)
    assert run.was_killed is unexplained
