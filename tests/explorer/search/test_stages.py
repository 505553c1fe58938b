"""A search first finds the best in eager code, then compiles what may beat it."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.measurement import Measurement
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.search.suggestion import ASSUMED_SECONDS
from tests.explorer.explorations import lines, run, trials_of
from tests.explorer.search.small import REPORT, small_request, small_state
from tests.explorer.simulator import SimulatedDevice

SPEED = 0.8
"""Of compiled code: seconds over those of eager code."""
COMPILING_SECONDS = 5.0


class Compiles(SimulatedDevice):
    """A device whose compiled components take SPEED of the time, and COMPILING_SECONDS to compile."""

    def seconds(self, component: Any, model: Any) -> tuple[float, float]:
        device, host = super().seconds(component, model)
        return (SPEED * device, SPEED * host) if component.is_compiled else (device, host)

    def __call__(self, task: TrialTask) -> Measurement:
        found = super().__call__(task)
        compiled = sum(each.component.is_compiled for each in found.components)
        phases = found.phases.model_copy(update={"warm_up": found.phases.warm_up + COMPILING_SECONDS * compiled})
        return found.model_copy(update={"phases": phases})


def request(**changes: Any) -> Any:
    return small_request(execution=["eager", "compile"], **changes)


def is_eager(trial: Trial) -> bool:
    return trial.candidate.execution is Execution.EAGER


def searched(trials: list[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.kind is TrialKind.COMPONENTS]


def test_only_contenders_are_compiled() -> None:
    steps = run(request(), Compiles(request()), rep=REPORT)
    compiled = {
        measured.component
        for trial in searched(trials_of(steps))
        for measured in trial.measurement.components
        if measured.component.is_compiled
    }
    table = small_state(execution=["eager", "compile"]).table
    assert 0 < len(compiled) < sum(component.is_compiled for component in table.components) / 2


def test_a_resumed_search_goes_on_where_it_was() -> None:
    whole = trials_of(run(request(), Compiles(request()), rep=REPORT))
    begun = [trial for trial in whole if trial.kind is TrialKind.COMPONENTS]
    for number in (2, len(begun) - 1):
        resumed = run(request(), Compiles(request()), rep=REPORT, history=whole[:number])
        assert [t.candidate for t in trials_of(resumed)][:1] == [whole[number].candidate]
        assert len(lines(resumed, EventCode.EAGER)) == (1 if all(map(is_eager, whole[:number])) else 0)


def test_without_a_choice_there_is_one_stage() -> None:
    steps = run(small_request(), SimulatedDevice(small_request()), rep=REPORT)
    assert lines(steps, EventCode.EAGER) == []


def test_what_compiling_takes_is_learnt_from_trials() -> None:
    state = small_state(execution=["eager", "compile"])
    compiled = state.surrogate.compiled_K
    assert compiled.any()
    assert not compiled.all()
    (assumed,) = set(state.measuring_seconds_K[compiled].round(0))
    assert assumed == pytest.approx(ASSUMED_SECONDS["cuda"], abs=1.0)
    assert state.measuring_seconds_K[~compiled].max() < 1.0
