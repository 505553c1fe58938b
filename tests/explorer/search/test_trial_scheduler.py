"""Several trials in flight: they look at different things, and the answer is as good as with one."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np
import pytest

from bexp.explorer.cost_model.composition import Composition
from bexp.explorer.records.measurement import Conditions, Measurement, Outcome
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.search.acquisition import suggest_measurement
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import enumerate_candidates
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.suggestion import Suggestion, measuring_seconds, split_suggestion
from bexp.explorer.search.trial_executor import TrialExecutor
from tests.explorer.explorations import answer_of, explored, pruned, request, run, trials_of
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
    found = answer_of(run(req, several)).recommendation
    assert found is not None
    assert found.confidence >= req.budget.confidence_target
    for together in several.together:
        keys = [c.key for plan in together for c in plan.components]
        assert len(keys) == len(set(keys))
    measured = [c.key for plan in device.plans for c in plan.components if not plan.again]
    assert len(measured) == len(set(measured))
    assert max(map(len, several.together)) == 4
    table = Composition(enumerate_candidates(req, report(memory_gib=40), req.shapes).candidates, req.shapes, req)
    truth = device.true_tokens_per_second(table)
    alone = answer_of(explored()[1]).recommendation
    assert alone is not None
    assert truth[table.row[found.candidate]] >= 0.99 * truth[table.row[alone.candidate]]


def test_base_and_whole_models_have_the_devices_to_themselves() -> None:
    several = Several(SimulatedDevice(request()), 4)
    steps = run(request(), several)
    base = trials_of(steps)[0].candidate
    first_other = next(t for t in several.together if any(plan.candidate != base for plan in t))
    known = [c for plan in several.device.plans for c in plan.components if plan.candidate == base]
    assert all(plan.candidate != base for plan in first_other)
    assert len(known) >= 4
    whole = [t for t in several.together if any(plan.kind is TrialKind.WHOLE_MODEL for plan in t)]
    assert whole
    assert all(len(together) == 1 for together in whole)


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
    found = answer_of(steps).recommendation
    assert found is not None
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
    found = answer_of(steps).recommendation
    assert found is not None
    assert found.measured_peak_bytes is not None
    assert found.memory.total <= found.memory_limit_bytes
    reasons = [t.measurement.reason for t in trials_of(steps) if t.measurement.outcome is Outcome.OUT_OF_MEMORY]
    assert any(re.fullmatch(NEEDS, reason or "") for reason in reasons)


def state_after_base() -> tuple[Posterior, SimulatedDevice]:
    req = request()
    rep = report(memory_gib=40)
    candidates = enumerate_candidates(req, rep, req.shapes).candidates
    state = Posterior.of(Composition(candidates, req.shapes, req), candidates, req, rep.hardware)
    device = SimulatedDevice(req)
    plan = plan_of(state, 0, Suggestion(0, state.table.missing(0, state.surrogate.known_K)))
    state.knowledge.learn(0, device(plan))
    return state, device


def plan_of(state: Posterior, number: int, suggestion: Suggestion) -> TrialTask:
    return TrialTask(
        number=number,
        kind=TrialKind.COMPONENTS,
        model=state.table.model,
        candidate=state.table.candidates[suggestion.row],
        components=suggestion.components,
        timeout_seconds=1.0,
    )


def test_trials_in_flight_move_the_next_suggestion_and_nothing_else() -> None:
    state, device = state_after_base()
    verdict, means = state.recommend(), state.mean_tokens_per_second().copy()
    first = suggest_measurement(state)
    assert first is not None
    state.knowledge.expect(1, first)
    second = suggest_measurement(state)
    assert second is not None
    assert not set(second.components) & set(first.components)
    assert state.recommend() == verdict
    assert np.array_equal(state.mean_tokens_per_second(), means)
    untouched, _ = state_after_base()
    found = device(plan_of(state, 1, first))
    for each in (state, untouched):
        each.knowledge.learn(1, found)
    assert suggest_measurement(state) == suggest_measurement(untouched)


def test_the_believed_surrogate_is_surer_of_what_is_in_flight_and_expects_the_same() -> None:
    state, _ = state_after_base()
    suggestion = suggest_measurement(state)
    assert suggestion is not None
    columns = [state.table.column[c] for c in suggestion.components]
    believed = state.surrogate.expecting(suggestion.components)
    assert believed.log_std_K[columns].sum() < 0.5 * state.surrogate.log_std_K[columns].sum()
    assert believed.device_mean_K[columns] == pytest.approx(state.surrogate.device_mean_K[columns], rel=0.05)
    assert not state.surrogate.known_K[columns].any()


def test_parts_of_a_suggestion_take_about_as_long() -> None:
    state, _ = state_after_base()
    row = len(state.table.candidates) - 1
    suggestion = Suggestion(row, state.table.missing(row, state.surrogate.known_K))
    assert len(suggestion.components) >= 3
    assert split_suggestion(suggestion, 1, state.table, state.surrogate) == (suggestion,)
    parts = split_suggestion(suggestion, 2, state.table, state.surrogate)
    assert sorted(c.key for p in parts for c in p.components) == sorted(c.key for c in suggestion.components)
    costs = measuring_seconds(state.surrogate.device_mean_K)
    loads = [sum(costs[state.table.column[c]] for c in part.components) for part in parts]
    longest = max(costs[state.table.column[c]] for c in suggestion.components)
    assert len(parts) == 2
    assert max(loads) <= max(longest, 4 / 3 * sum(loads) / 2)


class OneSecondEach(Several):
    """Every trial takes a second of a clock that nothing else moves."""

    now = 5.0

    def wait(self) -> tuple[TrialTask, Measurement]:
        self.now += 1.0
        return super().wait()


def test_a_trial_holds_its_seconds_and_what_was_predicted_of_it() -> None:
    req = request()
    device = OneSecondEach(SimulatedDevice(req), 1)
    steps = list(explore(req, report(memory_gib=40), device, clock=lambda: device.now, prune=pruned))
    trials = trials_of(steps)
    assert {t.kind for t in trials} == {TrialKind.COMPONENTS, TrialKind.WHOLE_MODEL}
    assert all(t.seconds == 1.0 for t in trials)
    assert all(t.suggest_seconds == 0.0 for t in trials)
    composed = [t for t in trials if t.kind is TrialKind.COMPONENTS and t.tokens_per_second is not None]
    assert composed
    for t in composed:
        assert t.predicted_tokens_per_second is not None
        assert t.tokens_per_second is not None
        assert 0.2 < t.predicted_tokens_per_second / t.tokens_per_second < 5.0
    weighed = [t for t in trials if t.measured_peak_bytes is not None and t.kind is TrialKind.COMPONENTS]
    assert weighed
    for t in weighed:
        assert t.predicted_peak_bytes is not None
        assert t.measured_peak_bytes is not None
        assert 0.3 < t.predicted_peak_bytes / t.measured_peak_bytes < 3.0
