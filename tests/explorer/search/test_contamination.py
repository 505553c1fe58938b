"""What a shared or throttled device measures is told, made again, and neither learnt from nor recommended."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, SLOWDOWNS, Conditions, Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.search.history import HOPELESS_CONTAMINATED
from tests.explorer.explorations import answer_of, best_of, lines, request, run, trials_of
from tests.explorer.notes import notes_of
from tests.explorer.simulator import SimulatedDevice

CALM = Conditions(sm_clock_mhz=1500, power_watts=690, clock_reasons=("sw_power_cap", "gpu_idle"), host_busy_share=0.9)
HOT = Conditions(temperature_celsius=91, clock_reasons=("sw_power_cap", "hw_thermal_slowdown"))
SHARED = Conditions(foreign_processes=1, foreign_bytes=12 << 30)


@pytest.mark.parametrize("reason", SLOWDOWNS)
def test_a_device_that_is_told_to_slow_down_taints(reason: str) -> None:
    assert Conditions(clock_reasons=("sw_power_cap", reason)).contamination == f"the device is throttled: {reason}"


@pytest.mark.parametrize("conditions", [CALM, Conditions(), Conditions(foreign_busy_share=0.01)])
def test_power_caps_idleness_and_busy_hosts_do_not_taint(conditions: Conditions) -> None:
    assert conditions.contamination is None


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (SHARED, "shared with another process, which took 12 GiB"),
        (Conditions(foreign_bytes=300 << 20), "shared with another process"),
        (Conditions(foreign_processes=2), "shared with 2 other processes"),
        (Conditions(foreign_busy_share=0.4), "shared with another process"),
    ],
)
def test_other_processes_taint(conditions: Conditions, words: str) -> None:
    assert words in str(conditions.contamination)


class DisturbedDevice(SimulatedDevice):
    """What is disturbed takes three times as long. `trials` are disturbed as a whole, `parts` whenever they are run."""

    def __init__(self, *, trials: tuple[int, ...] = (), parts: frozenset[ComponentKind] = frozenset()) -> None:
        super().__init__(request(), noise=0.0)
        self.conditions = lambda plan, part: SHARED if self._disturbs(plan, part) else CALM
        self._trials = trials
        self._parts = parts

    def _disturbs(self, task: TrialTask, part: Component | None) -> bool:
        return task.number in self._trials or (part is not None and part.kind in self._parts)

    def __call__(self, task: TrialTask) -> Measurement:
        measurement = super().__call__(task)
        slow = tuple(
            m.model_copy(update={"device_seconds": 3 * m.device_seconds}) if m.contamination else m
            for m in measurement.components
        )
        return measurement.model_copy(update={"components": slow})


def recommended(device: SimulatedDevice, *, history: tuple[Trial, ...] = ()) -> Recommendation:
    return best_of(run(device.request, device, history=history))


@cache
def calm_device() -> tuple[SimulatedDevice, Recommendation]:
    """A device that nothing disturbed, after an exploration, and what it recommends."""
    device = DisturbedDevice()
    return device, recommended(device)


@pytest.mark.parametrize("disturbed", [(0,), (2, 3), (1, 4, 6)])
def test_a_disturbed_trial_is_measured_again_and_changes_nothing(disturbed: tuple[int, ...]) -> None:
    (calm, expected), device = calm_device(), DisturbedDevice(trials=disturbed)
    steps = run(device.request, device)
    trials = trials_of(steps)
    for number in disturbed:
        assert trials[number].measurement.outcome is Outcome.CONTAMINATED
        assert trials[number].tokens_per_second is None
        assert device.plans[number + 1].candidate == device.plans[number].candidate
        assert device.plans[number + 1].components == device.plans[number].components
    assert expected == answer_of(steps).recommendation
    assert [plan.candidate for plan in calm.plans] == [
        plan.candidate for plan in device.plans if plan.number not in disturbed
    ]
    warnings = [line for line in lines(steps, EventCode.WARNING) if line.startswith("Contaminated: ")]
    assert len(warnings) == len(disturbed)
    assert all("shared with another process" in line and "not learnt from" in line for line in warnings)


def test_only_the_disturbed_part_of_a_trial_is_measured_again() -> None:
    device = DisturbedDevice()
    device.conditions = lambda plan, part: (
        HOT if plan.number == 0 and part and part.kind is ComponentKind.HEAD else CALM
    )
    run(device.request, device)
    assert [c.kind for c in device.plans[1].components] == [ComponentKind.HEAD]
    assert device.plans[1].candidate == device.plans[0].candidate
    measured = [c.key for plan in device.plans[1:] for c in plan.components]
    assert len(measured) == len(set(measured))


def test_what_stays_disturbed_is_given_up_and_never_recommended() -> None:
    device = DisturbedDevice()
    device.conditions = lambda plan, part: HOT if part is not None and part.experts == "grouped_mm" else CALM
    found = recommended(device)
    assert found.candidate.expert_backend != "grouped_mm"
    tried = [c for plan in device.plans for c in plan.components if c.experts == "grouped_mm"]
    assert tried
    assert all(tried.count(component) == CONTAMINATED_ATTEMPTS for component in tried)
    assert not any(
        c.candidate.expert_backend == "grouped_mm"
        for c in map(found.alternative, (Role.STOCK, Role.LARGEST_MICRO_BATCH))
        if c
    )


def test_a_device_that_is_always_shared_gives_no_answer_but_the_reason() -> None:
    device = DisturbedDevice(parts=frozenset(ComponentKind))
    steps = run(device.request, device)
    answer = answer_of(steps)
    assert answer.recommendation is None
    assert "shared with another process, which took 12 GiB" in str(answer.variants[0].reason)
    assert len(device.plans) == CONTAMINATED_ATTEMPTS
    assert not lines(steps, EventCode.RECOMMENDATION)


def test_a_device_that_is_shared_for_long_is_given_up() -> None:
    device = DisturbedDevice(trials=tuple(range(5, 1000)))
    steps = run(device.request, device)
    assert len(device.plans) <= 5 + HOPELESS_CONTAMINATED + CONTAMINATED_ATTEMPTS  # the whole model's among them
    assert answer_of(steps).recommendation is not None, "what was measured before is sound"


@cache
def uninterrupted(disturbed: tuple[int, ...]) -> tuple[Progress, ...]:
    return tuple(run(request(), DisturbedDevice(trials=disturbed)))


@pytest.mark.parametrize(
    ("disturbed", "stop_after"), [((0,), 1), ((0, 1, 2), 2), ((2, 3), 3), ((1, 4, 6), 5), ((1, 4, 6), 7)]
)
def test_resumes_amid_disturbances_as_if_never_interrupted(disturbed: tuple[int, ...], stop_after: int) -> None:
    whole = list(uninterrupted(disturbed))
    before = whole[:stop_after]
    after = run(request(), DisturbedDevice(trials=disturbed), history=trials_of(before))

    def tried(trials: list[Trial]) -> list[object]:
        return [
            (t.number, t.candidate, t.measurement.outcome, [m.component.key for m in t.measurement.components])
            for t in trials
        ]

    assert tried(trials_of(before) + trials_of(after)) == tried(trials_of(whole))
    assert answer_of(after) == answer_of(whole)
    for code in (EventCode.BASE, EventCode.TRIAL, EventCode.WARNING, EventCode.RECOMMENDATION):
        assert lines(before, code) + lines(after, code) == lines(whole, code)


def whole_models(device: SimulatedDevice) -> list[int]:
    return [i for i, plan in enumerate(device.plans) if plan.kind is TrialKind.WHOLE_MODEL]


def test_a_whole_model_that_stays_disturbed_leaves_the_answer_unchecked() -> None:
    device = DisturbedDevice()
    device.conditions = lambda plan, part: CALM if part is not None else HOT
    found = recommended(device)
    assert len(whole_models(device)) == CONTAMINATED_ATTEMPTS
    assert found.whole_model is None
    assert any("whole model: contaminated: the device is throttled" in note for note in notes_of(found))


def test_a_variant_does_not_learn_from_another_variants_disturbed_trial() -> None:
    req = request(num_query_groups=[4, 1], micro_batch_size=[2, 4])
    device = SimulatedDevice(req, noise=0.0)
    device.conditions = lambda plan, part: HOT if part and part.kind is ComponentKind.EMBEDDING else CALM
    answer = answer_of(run(req, device))
    assert [v.recommendation for v in answer.variants] == [None, None]
    runs = [c for plan in device.plans for c in plan.components if c.kind is ComponentKind.EMBEDDING]
    assert all(runs.count(component) <= CONTAMINATED_ATTEMPTS for component in runs)


@pytest.mark.parametrize("kind", [ComponentKind.ATTENTION, ComponentKind.MOE_FFN])
def test_resumes_after_a_trial_of_which_only_a_part_was_disturbed(kind: ComponentKind) -> None:
    """What was not disturbed is learnt, and may draw the search elsewhere: the rest is measured again first."""

    def device() -> SimulatedDevice:
        made = DisturbedDevice()
        made.conditions = lambda plan, part: HOT if plan.number % 2 and part and part.kind is kind else CALM
        return made

    whole = run(request(), device())
    trials = trials_of(whole)
    contaminated = [t.number for t in trials if t.measurement.outcome is Outcome.CONTAMINATED]
    assert contaminated
    for cut in (number + 1 for number in contaminated):
        again = device()
        assert answer_of(run(again.request, again, history=trials[:cut])) == answer_of(whole)
        assert [plan.number for plan in again.plans] == list(range(cut, len(trials)))
        assert [plan.candidate for plan in again.plans] == [t.candidate for t in trials[cut:]]


def test_repeats_that_are_always_disturbed_come_to_an_end() -> None:
    """On a noisy device components are measured again, and each of those runs is contaminated."""
    req = request(verify=False, recompute=["none", "full"])
    device = SimulatedDevice(req, noise=0.25)
    device.conditions = lambda plan, part: HOT if plan.again else CALM
    assert recommended(device)
    runs = Counter(component for plan in device.plans for component in plan.components)
    assert any(plan.again for plan in device.plans)
    assert max(runs.values()) <= 1 + CONTAMINATED_ATTEMPTS
