"""A search that starts from the components of an earlier one, on a space of a dozen candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bexp.explorer.cost.components import Component
from bexp.explorer.records.device_report import DeviceReport, EarlierRun, EarlierRuns
from bexp.explorer.records.event import EventCode, EventDraft, Progress
from bexp.explorer.records.measurement import ComponentMeasurement, Conditions, Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial, TrialTask
from bexp.explorer.search.earlier_check import MOST_CHECKED
from tests.explorer.explorations import trials_of
from tests.explorer.notes import notes_of
from tests.explorer.search.small import REPORT, small_request
from tests.explorer.search.test_loop import codes, message, search
from tests.explorer.simulator import SimulatedDevice


def measured_by(trials: Sequence[Trial]) -> list[ComponentMeasurement]:
    return [found for trial in trials for found in trial.measurement.components]


def with_earlier(*, factor: float = 1.0, **changes: Any) -> DeviceReport:
    """The report of a device on which an earlier search took `factor` times as long."""
    steps, _ = search(small_request())
    runs = tuple(
        EarlierRun(
            measurement=found.model_copy(update={"device_seconds": factor * found.device_seconds}), age_seconds=3600.0
        )
        for found in measured_by(trials_of(steps))
    )
    return REPORT.model_copy(update={"earlier": EarlierRuns(runs=runs, num_explorations=2, **changes)})


def told(steps: Sequence[Progress]) -> EventDraft:
    (event,) = (event for step in steps for event in step.events if event.code is EventCode.REUSED)
    return event


def components_of(trial: Trial) -> list[Component]:
    return [found.component for found in trial.measurement.components]


def searched(report: DeviceReport, device: SimulatedDevice | None = None) -> tuple[list[Progress], Recommendation]:
    steps, found = search(small_request(verify=False), device, report=report)
    assert found is not None
    return steps, found


def test_a_search_reuses_components_after_it_has_measured_a_few_of_them_again() -> None:
    plain, before = searched(REPORT)
    steps, after = searched(with_earlier())
    assert after.candidate == before.candidate
    assert len(measured_by(trials_of(steps))) < len(measured_by(trials_of(plain))) / 2
    first = trials_of(steps)[0]
    assert len(components_of(first)) == MOST_CHECKED
    assert told(steps).data["checked"] == [component.key for component in components_of(first)]
    assert told(steps).message.startswith("Reusing ")
    assert EventCode.BASE in [event.code for event in steps[0].events]  # it is known, so nobody measures it again
    assert after.reused is not None
    assert (after.reused.num_explorations, after.reused.num_checked) == (2, MOST_CHECKED)
    assert after.reused.largest_difference == pytest.approx(0.0, abs=1e-9)
    assert any("were measured in 2 earlier explorations" in note for note in notes_of(after))
    assert before.reused is None


def test_components_that_differ_by_more_than_noise_are_dropped_and_that_is_said() -> None:
    steps, after = searched(with_earlier(factor=1.25))
    plain, before = searched(REPORT)
    assert "-20.0%" in told(steps).message
    assert told(steps).data["reused"] is False
    assert after.reused is None
    assert after.tokens_per_second == pytest.approx(before.tokens_per_second, rel=1e-3)
    assert len({c for t in trials_of(steps) for c in components_of(t)}) >= len(components_of(trials_of(plain)[0]))


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.CONTAMINATED])
def test_components_that_cannot_be_measured_again_are_dropped(outcome: Outcome) -> None:
    class Troubled(SimulatedDevice):
        """The first trial crashes, or the device is shared in the first three."""

        def __call__(self, task: TrialTask) -> Measurement:
            found = super().__call__(task)
            if outcome is Outcome.CRASHED and task.number == 0:
                component = task.components[0]
                return Measurement(
                    candidate=task.candidate, outcome=outcome, failed_component=component, reason="as told"
                )
            return found

    device = Troubled(small_request(), noise=0.0)
    if outcome is Outcome.CONTAMINATED:
        device.conditions = lambda plan, _: Conditions(foreign_processes=1) if plan.number < 3 else None
    steps, found = searched(with_earlier(), device)
    assert told(steps).data["reason"] == "they could not be checked"
    assert found.reused is None


def test_a_resumed_search_goes_the_same_way_and_says_nothing_twice() -> None:
    report = with_earlier()
    req = small_request()
    steps, found = search(req, report=report)
    trials = trials_of(steps)
    for number in range(1, len(trials)):
        again, answer = search(req, history=trials[:number], report=report)
        assert [t.measurement for t in trials_of(again)] == [t.measurement for t in trials[number:]]
        assert answer == found
        assert EventCode.REUSED not in codes(again)
        assert EventCode.BASE not in codes(again)


def test_too_few_components_are_not_worth_a_check() -> None:
    report = with_earlier()
    few = report.earlier.model_copy(update={"runs": report.earlier.runs[:MOST_CHECKED]})
    steps, found = searched(report.model_copy(update={"earlier": few}))
    assert EventCode.REUSED not in codes(steps)
    assert steps[0].trial is not None
    assert steps[0].trial.candidate == found.base


def test_components_of_other_versions_are_mentioned_once() -> None:
    earlier = EarlierRuns(num_ignored=7, other_versions=("torch 2.10, bexp 1.0",))
    report = REPORT.model_copy(update={"earlier": earlier})
    steps, found = search(small_request(), report=report)
    assert "7 components measured with other versions: torch 2.10, bexp 1.0" in message(steps, EventCode.REUSED)
    resumed, again = search(small_request(), history=trials_of(steps)[:1], report=report)
    assert EventCode.REUSED not in codes(resumed)
    assert again == found
