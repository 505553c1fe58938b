"""Explorations of meshes, trial by trial, on simulated devices."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.components import Component, ComponentKind, Operation
from bexp.explorer.meshes.knowledge import MeshKnowledge
from bexp.explorer.meshes.mesh import MeshPlan, MeshRun
from bexp.explorer.meshes.posterior import Expected
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, Conditions, Outcome
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from tests.explorer.explorations import answer_of
from tests.explorer.meshes.test_answers import MODEL
from tests.explorer.simulator import SimulatedDevice, report


def request(**changes: Any) -> ExplorationRequest:
    values = {"model": MODEL, "num_devices": 4, "batch_size": 64, "micro_batch_size": [1, 2]}
    asked = {"tensor": "explore", "pipeline": [1, 2], "sharding": ["none", "zero1"]}
    return ExplorationRequest.model_validate({**values, "parallelism": asked, **changes})


def run(device: SimulatedDevice, history: tuple[Trial, ...] = ()) -> list[Progress]:
    there = report(memory_gib=40.0, experts=False, num_devices=4)
    return list(explore(device.request, there, device, history=history))


@pytest.fixture(scope="module")
def found() -> tuple[SimulatedDevice, list[Progress]]:
    device = SimulatedDevice(request())
    device.whole_model_factor = 1.1
    return device, run(device)


def test_exchanges_are_measured_first_and_whole_models_last(found: tuple[SimulatedDevice, list[Progress]]) -> None:
    device, steps = found
    first, *others = device.plans
    assert {c.kind for c in first.components} == {ComponentKind.EXCHANGE}
    of_dense = set(Operation) - {Operation.ALL_TO_ALL, Operation.BROADCAST}
    assert {c.exchange.operation for c in first.components if c.exchange} == of_dense
    assert first.groups == ((4, 1), (2, 1), (2, 2))
    assert all(plan.num_processes == 4 for plan in device.plans)
    kinds = [plan.kind for plan in others]
    assert kinds == sorted(kinds), "components, then whole models"
    whole = [plan for plan in others if plan.kind is TrialKind.WHOLE_MODEL]
    assert len(whole) >= 2, "the recommended mesh and another"
    assert all(
        isinstance(p.shared_run, MeshRun) and sum(p.shared_run.layers_per_stage) == MODEL["num_layers"] for p in whole
    )
    limits = {plan.kind: plan.timeout_seconds for plan in others}
    assert limits[TrialKind.WHOLE_MODEL] == 3 * limits[TrialKind.COMPONENTS], "it builds all layers"
    codes = [event.code for step in steps for event in step.events]
    assert codes[:3] == [EventCode.TRIAL, EventCode.SPACE, EventCode.BASE]


def test_a_resumed_exploration_measures_nothing_twice(found: tuple[SimulatedDevice, list[Progress]]) -> None:
    device, steps = found
    trials = tuple(step.trial for step in steps if step.trial is not None)
    again = SimulatedDevice(device.request)
    whole = run(again, trials)
    assert not again.plans
    assert whole[-1].answer == steps[-1].answer


def test_a_mesh_whose_ranks_run_out_of_memory_is_not_recommended() -> None:
    device = SimulatedDevice(request())
    device.whole_model_outcomes = [Outcome.OUT_OF_MEMORY]
    steps = run(device)
    trials = [step.trial for step in steps if step.trial is not None and step.trial.shared_run is not None]
    assert trials[0].measurement.outcome is Outcome.OUT_OF_MEMORY
    answer = answer_of(steps)
    best = answer.recommendation
    assert best is not None
    assert isinstance(best.plan, MeshPlan)
    assert isinstance(trials[0].shared_run, MeshRun)
    refused = (trials[0].shared_run.mesh, trials[0].candidate)
    assert (best.plan.mesh, best.candidate.model_copy(update={"sharding": None})) != refused
    assert best.whole_model is not None


def test_no_whole_model_is_run_after_two_that_pass_the_deadline() -> None:
    device = SimulatedDevice(request())
    device.whole_model_outcomes = [Outcome.TIMED_OUT] * 6
    run(device)
    assert len([plan for plan in device.plans if plan.kind is TrialKind.WHOLE_MODEL]) == 2


@pytest.mark.parametrize(("best_ran", "other_ran"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_mesh_that_was_not_run_whole_is_no_faster_than_one_that_was(best_ran: bool, other_ran: bool) -> None:
    space = MeshKnowledge(request(), report(num_devices=4))
    point = space.candidates[0]
    ran = {"best": best_ran, "other": other_ran}
    space.expected = lambda _: Expected(1.0, is_own=ran["best"])
    best = space.ranked(point)
    space.expected = lambda _: Expected(0.8, is_own=ran["other"])
    ratio = best.tokens_per_second / space.ranked(point).compared_with(best)
    assert ratio == pytest.approx(1.0 if best_ran and not other_ran else 0.8)


@pytest.mark.parametrize("num_disturbed", [1, 2])
def test_a_block_of_a_disturbed_device_is_measured_again_at_once(num_disturbed: int) -> None:
    device = SimulatedDevice(request())
    shared = Conditions(foreign_processes=1)
    disturbed = range(1, 1 + num_disturbed)
    device.conditions = lambda plan, component: shared if plan.number in disturbed else None
    steps = run(device)
    for number in disturbed:
        assert device.plans[number].components == device.plans[number + 1].components
        assert device.plans[number].candidate == device.plans[number + 1].candidate
    trials = [step.trial for step in steps if step.trial is not None]
    contaminated = [t.number for t in trials if t.measurement.outcome is Outcome.CONTAMINATED]
    assert contaminated == list(disturbed)
    assert steps[-1].recommendation is not None
    before = list(trials[: num_disturbed + 1])
    resumed = SimulatedDevice(request())
    after = run(resumed, tuple(before))
    assert resumed.plans[0].components == device.plans[1].components
    assert after[-1].recommendation is not None


def test_a_block_that_stays_disturbed_rules_out_its_candidates_alone() -> None:
    device = SimulatedDevice(request())
    shared = Conditions(foreign_processes=1)
    disturbed: list[Component] = []

    def disturb(task: TrialTask, component: Component | None) -> Conditions | None:
        if component is None or component.kind is not ComponentKind.DENSE_FFN:
            return None
        disturbed[:] = disturbed or [component]
        return shared if component in disturbed else None

    device.conditions = disturb
    steps = run(device)
    (block,) = disturbed
    again = [plan for plan in device.plans if block in plan.components]
    assert len(again) == CONTAMINATED_ATTEMPTS
    base, best = again[0].candidate, steps[-1].recommendation
    assert best is not None
    assert isinstance(best.plan, MeshPlan)
    assert (best.plan.mesh.tensor, best.candidate.micro_batch_size) != (1, base.micro_batch_size)
