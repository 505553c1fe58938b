"""Several trials in flight: they look at different things, and the answer is as good as with one."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from bexp.explorer.cost.composition import Composition
from bexp.explorer.records.measurement import Conditions, Measurement, Outcome
from bexp.explorer.records.trial import Trial, TrialExecutor, TrialTask
from bexp.explorer.search.legal_space import enumerate_candidates
from tests.explorer.explorations import answer_of, best_of, explored, request, run, trials_of
from tests.explorer.simulator import SimulatedDevice, report

NEEDS = r"a step needs \d+\.\d\d GiB, \d+\.\d\d of it allocated; the limit is 10\.00 GiB"


class Several(TrialExecutor):
    """Trials end in an order that a seed decides; null: in the order in which they began."""

    def __init__(self, device: SimulatedDevice, capacity: int, order: int | None = 0) -> None:
        self.device = device
        self.in_flight: list[TrialTask] = []
        self.together: list[tuple[TrialTask, ...]] = []
        self._capacity = capacity
        self._rng = None if order is None else random.Random(order)

    @property
    def capacity(self) -> int:
        return self._capacity

    def submit(self, task: TrialTask) -> None:
        self.in_flight.append(task)
        self.together.append(tuple(self.in_flight))
        assert len(self.in_flight) <= self._capacity

    def wait(self) -> tuple[TrialTask, Measurement]:
        index = 0 if self._rng is None else self._rng.randrange(len(self.in_flight))
        plan = self.in_flight.pop(index)
        return plan, self.device(plan)


def plans_of(steps_trials: Sequence[Trial]) -> list[tuple[int, str]]:
    return [(t.number, t.candidate.describe()) for t in steps_trials]


@pytest.mark.parametrize("order", [None, 0])
def test_nothing_is_ordered_twice_and_the_answer_is_within_tolerance(order: int | None) -> None:
    req = request()
    device = SimulatedDevice(req)
    several = Several(device, 4, order)
    found = best_of(run(req, several))
    assert found.confidence >= req.budget.confidence_target
    for together in several.together:
        keys = [c.key for plan in together for c in plan.components]
        assert len(keys) == len(set(keys))
    measured = [c.key for plan in device.plans for c in plan.components if not plan.again]
    assert len(measured) == len(set(measured))
    assert max(map(len, several.together)) == 4
    table = Composition(enumerate_candidates(req, report(memory_gib=40), req.shapes).candidates, req.shapes, req)
    truth = device.true_tokens_per_second(table)
    alone = best_of(explored()[1])
    assert truth[table.row[found.candidate]] >= 0.99 * truth[table.row[alone.candidate]]


def test_one_in_flight_is_the_search_as_it_was() -> None:
    again = trials_of(run(request(), Several(SimulatedDevice(request()), 1)))
    assert [(t.number, t.measurement) for t in again] == [(t.number, t.measurement) for t in trials_of(explored()[1])]


def test_an_order_of_completion_decides_what_is_suggested() -> None:
    req = request()
    first, second, other = (
        trials_of(run(req, Several(SimulatedDevice(req, noise=0.0), 3, order))) for order in (1, 1, 2)
    )
    assert plans_of(first) == plans_of(second)
    assert plans_of(first) != plans_of(other)
    assert [t.number for t in first] != sorted(t.number for t in first)


@pytest.mark.parametrize("stop_after", [2, 5, 9])
def test_a_resume_measures_what_was_in_flight_and_nothing_that_is_stored(stop_after: int) -> None:
    req = request()
    before = trials_of(run(req, Several(SimulatedDevice(req, noise=0.0), 4), stop_after=stop_after))
    device = SimulatedDevice(req, noise=0.0)
    steps = run(req, Several(device, 4), history=sorted(before, key=lambda t: t.number))
    after = trials_of(steps)
    numbers = [t.number for t in (*before, *after)]
    assert len(numbers) == len(set(numbers))
    assert min(t.number for t in after) == max(t.number for t in before) + 1
    stored = {c.component.key for t in before for c in t.measurement.components}
    assert not stored & {c.key for plan in device.plans for c in plan.components}
    found = best_of(steps)
    assert found.confidence >= req.budget.confidence_target


@pytest.mark.parametrize("most", [3, 7, 10])
def test_the_budget_counts_what_is_in_flight(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bexp.explorer.search.loop.MOST_COMPARISONS", 0)  # they may take more
    req = request(budget={"max_trials": most, "confidence_target": 99}, verify=False)
    several = Several(SimulatedDevice(req), 4)
    steps = run(req, several)
    assert len(several.device.plans) == len(trials_of(steps)) == most
    assert answer_of(steps).recommendation is not None


def test_what_was_contaminated_is_measured_again() -> None:
    req = request(verify=False)
    device = SimulatedDevice(req)
    shared = Conditions(foreign_processes=1)
    device.conditions = lambda plan, component: shared if plan.number in {1, 6, 7} else None
    several = Several(device, 4)
    steps = run(req, several)
    contaminated = [t for t in trials_of(steps) if t.measurement.outcome is Outcome.CONTAMINATED]
    assert len(contaminated) == 3
    for trial in contaminated:
        for found in trial.measurement.components:
            runs = [p.number for p in device.plans if found.component in p.components]
            assert any(number != trial.number for number in runs)
    assert answer_of(steps).recommendation is not None


def test_what_is_too_large_is_judged_once_all_of_it_is_known() -> None:
    req = request(memory_limit_gib=10)
    steps = run(req, Several(SimulatedDevice(req, activations=1.5), 4))
    found = best_of(steps)
    assert found.measured_peak_bytes is not None
    assert found.memory.total <= found.memory_limit_bytes
    reasons = [t.measurement.reason for t in trials_of(steps) if t.measurement.outcome is Outcome.OUT_OF_MEMORY]
    assert any(re.fullmatch(NEEDS, reason or "") for reason in reasons)


def test_an_executor_that_returns_another_trial_is_a_mistake() -> None:
    executor = Several(SimulatedDevice(request(), noise=0.0), 2, None)
    first, second = explored()[0].plans[:2]
    executor.submit(first)
    with pytest.raises(AssertionError, match="another trial was in flight"):
        executor(second)
