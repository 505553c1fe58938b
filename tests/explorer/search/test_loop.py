"""The phases of a search, on a space of a dozen candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.explorer.records.trial import Trial, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import open_candidates
from bexp.explorer.search.legal_space import PrunedSpace
from bexp.explorer.search.loop import ProgressLog, SearchLoop, VariantContext
from tests.explorer.alternatives import other_of
from tests.explorer.explorations import pruned, trials_of
from tests.explorer.search.small import candidate, context, small_request, small_space
from tests.explorer.simulator import SimulatedDevice


class Fails(SimulatedDevice):
    """Trials of some candidates end with an outcome other than ok."""

    def __init__(self, req: ExplorationRequest, failing: dict[Candidate, Outcome]) -> None:
        super().__init__(req, noise=0.0)
        self.failing = failing

    def __call__(self, task: TrialTask) -> Measurement:
        found = super().__call__(task)
        if task.candidate not in self.failing:
            return found
        outcome = self.failing[task.candidate]
        return Measurement(candidate=task.candidate, outcome=outcome, reason="as told", phases=found.phases)


def loop(made: VariantContext, pruned_space: PrunedSpace) -> SearchLoop:
    log = ProgressLog(is_main=made.is_main)
    space = open_candidates(made, lambda *_: pruned_space, log)
    assert space is not None
    return SearchLoop(made, space, log)


def search(
    req: ExplorationRequest, device: SimulatedDevice | None = None, history: Sequence[Trial] = (), **changes: Any
) -> tuple[list[Progress], Recommendation | None]:
    made = context(req, history, measure=device or SimulatedDevice(req, noise=0.0), **changes)
    steps, running = [], loop(made, small_space(req)).run()
    while True:
        try:
            steps.append(next(running))
        except StopIteration as end:
            return steps, end.value


def codes(steps: Sequence[Progress]) -> list[EventCode]:
    return [event.code for step in steps for event in step.events]


def message(steps: Sequence[Progress], code: EventCode) -> str:
    (found,) = (event.message for step in steps for event in step.events if event.code is code)
    return found


def test_if_the_plainest_base_fails_the_next_one_is_the_base() -> None:
    req = small_request()
    steps, found = search(req, Fails(req, {candidate(1): Outcome.OUT_OF_MEMORY}))
    tried = [t.candidate for t in trials_of(steps)[:2]]
    assert tried == [candidate(1), candidate(1, recompute="selective")]
    assert message(steps, EventCode.BASE).endswith("the plainer ones do not fit or fail")
    assert found is not None
    assert found.base == candidate(1, recompute="selective")


def test_without_a_base_the_first_candidate_that_ran_is_compared_with() -> None:
    req = small_request()
    policies = ("none", "selective", "full")
    device = Fails(req, {candidate(1, recompute=policy): Outcome.OUT_OF_MEMORY for policy in policies})
    steps, found = search(req, device)
    assert [t.candidate.recompute for t in trials_of(steps)[:3]] == list(policies)
    assert EventCode.BASE not in codes(steps)
    warnings = [e.message for step in steps for e in step.events if e.code is EventCode.WARNING]
    assert warnings[0].startswith("No base candidate fits")
    ran = next(t.candidate for t in trials_of(steps) if t.measurement.outcome is Outcome.OK)
    assert found is not None
    assert found.base == ran


def test_only_components_of_the_answer_and_its_rival_are_measured_again_and_the_answer_in_full() -> None:
    req = small_request()
    device = SimulatedDevice(req, noise=0.0)
    steps, found = search(req, device)
    measured = [c for plan in device.plans for c in plan.components]
    assert all(len(plan.components) == len(set(plan.components)) for plan in device.plans)
    assert found is not None
    table = small_space(req).table
    assert table is not None
    answer, rival = (
        set(table.decompositions[table.row[one]].components)
        for one in (found.candidate, other_of(found, Role.RUNNER_UP).candidate)
    )
    assert {component for component, times in Counter(measured).items() if times > 1} <= answer | rival
    assert answer <= set(measured)
    assert found.confidence >= req.budget.confidence_target
    assert [t.number for t in trials_of(steps)] == list(range(len(trials_of(steps))))


def test_whole_models_that_refute_the_answer_change_it_and_say_so() -> None:
    req = small_request(budget={"confidence_target": 99})
    _, plain = search(req)
    assert plain is not None
    device = SimulatedDevice(req, noise=0.0)
    device.own_factors = {plain.candidate: 3.0}
    steps, found = search(req, device)
    assert found is not None
    assert found.candidate != plain.candidate
    changed = message(steps, EventCode.ANSWER_CHANGED)
    assert plain.candidate.describe() in changed
    assert changed.endswith(found.candidate.describe())


def test_the_confidence_target_ends_the_search() -> None:
    easy, hard = (
        small_request(budget={"confidence_target": target}, verify=False, tolerance=0.2 if target == 1 else 0.001)
        for target in (1, 99)
    )
    assert len(trials_of(search(easy)[0])) < len(trials_of(search(hard)[0]))


def test_a_base_whose_whole_model_failed_is_the_base_after_a_resume() -> None:
    req = small_request(micro_batch_size=[1], attention_backends=["cudnn"])
    device = SimulatedDevice(req, noise=0.0)
    device.whole_model_outcomes = [Outcome.CRASHED]
    steps, found = search(req, device)
    assert found is not None
    assert found.base == candidate(1) != found.candidate
    trials = trials_of(steps)
    crashed = next(i for i, t in enumerate(trials) if t.measurement.outcome is Outcome.CRASHED)
    for stored in range(crashed + 1, len(trials) + 1):
        after, resumed = search(req, SimulatedDevice(req, noise=0.0), trials[:stored])
        assert [t.measurement for t in trials_of(after)] == [t.measurement for t in trials[stored:]]
        assert resumed == found


def test_components_of_another_variant_that_are_the_same_are_not_measured_again() -> None:
    req = small_request(num_query_groups=[4, 2], verify=False)
    steps, _ = search(req)
    trials = trials_of(steps)
    seen = {m.component for t in trials for m in t.measurement.components}
    assert any(c.kind is ComponentKind.HEAD for c in seen)
    made = context(req, trials, index=1, measure=(device := SimulatedDevice(req, noise=0.0)))
    list(loop(made, pruned(made.model, req, made.report)).run())
    measured = {c for plan in device.plans for c in plan.components}
    assert not measured & seen
    assert {c.num_query_groups for c in measured if c.kind is ComponentKind.ATTENTION} == {2}
