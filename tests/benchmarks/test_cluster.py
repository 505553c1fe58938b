from __future__ import annotations

import pytest

from benchmarks.cluster import REQUEST, run_trials, tiny_plans
from bexp.explorer.cost_model.candidate_table import SpaceTable
from bexp.explorer.cost_model.search_space import enumerate_candidates
from bexp.explorer.spec.request import ExplorationRequest
from tests.explorer.search.test_trial_scheduler import Several
from tests.explorer.simulator import SimulatedDevice, report


def test_all_trials_run_with_as_many_in_flight_as_asked_for() -> None:
    request = ExplorationRequest.model_validate(REQUEST)
    space = enumerate_candidates(request, report(experts=False), request.model)
    plans = tiny_plans(SpaceTable(space.candidates, request.model, request), 12)
    several = Several(SimulatedDevice(request), 2)
    found = run_trials(several, plans, 2)
    assert sorted(plan.number for plan in several.device.plans) == list(range(12))
    assert max(map(len, several.together)) == 2
    assert len(found["overhead_seconds"]) == 12
    assert found["trials_per_second"] == pytest.approx(12 / found["seconds"])
    alone = Several(SimulatedDevice(request), 2)
    run_trials(alone, plans, 1)
    assert max(map(len, alone.together)) == 1
