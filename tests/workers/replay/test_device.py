from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.records.measurement import Outcome, PhaseSeconds
from bexp.workers.replay.profiler import RecordedDevice, VirtualClock
from bexp.workers.replay.recording import WholeModelRow
from tests.workers.replay.samples import empty, figures, plan, recording, row, table_of


def test_answers_have_the_spread_of_the_recorded_runs() -> None:
    recorded = empty()
    component = table_of(recorded).components[0]
    runs = [0.010, 0.011, 0.012]
    for run, seconds in enumerate(runs):
        recorded.add(row(component, run, seconds))
    drawn = [RecordedDevice(recorded, seed=seed).draw(component) for seed in range(600)]
    logs = np.log([d.figures.device_seconds for d in drawn if d is not None and d.figures is not None])
    assert np.mean(logs) == pytest.approx(np.mean(np.log(runs)), abs=0.01)
    assert np.std(logs) == pytest.approx(np.std(np.log(runs), ddof=1), rel=0.1)


def test_a_single_run_is_moved_by_its_standard_error() -> None:
    recorded = empty()
    component = table_of(recorded).components[0]
    recorded.add(row(component).model_copy(update={"figures": figures(0.01, error=0.0005)}))
    drawn = [RecordedDevice(recorded, seed=seed).draw(component) for seed in range(600)]
    logs = np.log([d.figures.device_seconds for d in drawn if d is not None and d.figures is not None])
    assert np.std(logs) == pytest.approx(0.05, rel=0.15)


def test_answers_depend_on_the_seed_and_not_on_the_order() -> None:
    recorded = recording()
    table = table_of(recorded)
    model, candidate, components = table.model, table.candidates[0], table.components[:6]
    together = RecordedDevice(recorded, seed=3)(plan(model, candidate, components))
    apart = RecordedDevice(recorded, seed=3)
    answers = [apart(plan(model, candidate, (c,))).components[0] for c in reversed(components)]
    assert tuple(reversed(answers)) == together.components
    assert RecordedDevice(recorded, seed=4)(plan(model, candidate, components)).components != together.components


def test_a_component_that_is_measured_again_is_drawn_again_by_the_trials_number() -> None:
    recorded = empty()
    table = table_of(recorded)
    component = table.components[0]
    for run in range(40):
        recorded.add(row(component, run, 0.01 + 1e-5 * run))

    def answer(number: int, *, again: bool) -> float:
        asked = plan(table.model, table.candidates[0], (component,), number).model_copy(update={"again": again})
        return RecordedDevice(recorded, seed=3)(asked).components[0].device_seconds

    assert answer(0, again=False) == answer(5, again=False)
    assert answer(5, again=True) == answer(5, again=True)
    assert len({answer(number, again=True) for number in range(8)}) > 4


def test_a_block_that_waits_for_its_device_keeps_one_time() -> None:
    recorded = empty()
    component = table_of(recorded).components[0]
    for run, seconds in enumerate((0.01, 0.02)):
        waits = figures(seconds, host=seconds)
        recorded.add(row(component, run).model_copy(update={"figures": waits}))
    found = RecordedDevice(recorded, seed=0).draw(component)
    assert found is not None and found.figures is not None
    assert found.figures.host_seconds == found.figures.device_seconds


def test_a_failed_component_ends_the_trial_and_keeps_what_came_before() -> None:
    recorded = empty()
    table = table_of(recorded)
    first, second, third = table.components[:3]
    phases = PhaseSeconds(timed=1.0, messaging=0.1)
    recorded.add(row(first, phases=phases))
    recorded.add(row(second, outcome=Outcome.OUT_OF_MEMORY, reason="too large", phases=phases))
    recorded.add(row(third, phases=phases))
    clock = VirtualClock()
    found = RecordedDevice(recorded, seed=0, clock=clock)(
        plan(table.model, table.candidates[0], (first, second, third))
    )
    assert (found.outcome, found.reason, found.failed_component) == (Outcome.OUT_OF_MEMORY, "too large", second)
    assert [m.component for m in found.components] == [first]
    assert clock() == pytest.approx(2.1)


def test_a_process_that_did_not_survive_is_paid_for_in_the_next_trial() -> None:
    recorded = empty()
    table = table_of(recorded)
    first, second = table.components[:2]
    recorded.add(row(first, outcome=Outcome.CRASHED, reason="illegal access", replaced=True))
    recorded.add(row(second))
    device = RecordedDevice(recorded, seed=0)
    crash = device(plan(table.model, table.candidates[0], (first,)))
    after = [device(plan(table.model, table.candidates[0], (second,))) for _ in range(2)]
    assert [m.phases.process_start for m in (crash, *after)] == [0.0, 5.0, 0.0]
    assert device.replacements == 1
    assert device.clock() == 5.0


def test_what_was_never_recorded_is_unsupported_and_says_so() -> None:
    recorded = empty()
    table = table_of(recorded)
    device = RecordedDevice(recorded, seed=0)
    found = device(plan(table.model, table.candidates[0], table.components[:1]))
    assert (found.outcome, found.reason) == (Outcome.UNSUPPORTED, "never recorded")
    whole = device(plan(table.model, table.candidates[0]))
    assert (whole.outcome, whole.reason) == (Outcome.UNSUPPORTED, "the recorded table has no run of its whole model")


def test_a_whole_model_is_answered_as_it_was_recorded() -> None:
    recorded = recording(whole_model_share=1.0)
    table = table_of(recorded)
    candidate, rows = next((c, r) for c, r in recorded.whole_models.items() if r[0].figures is not None)
    found = RecordedDevice(recorded, seed=0)(plan(table.model, candidate))
    assert found.whole_model is not None and rows[0].figures is not None
    assert found.whole_model.micro_step_seconds == pytest.approx(rows[0].figures.micro_step_seconds, rel=0.02)
    recorded.whole_models[candidate] = [
        WholeModelRow(candidate=candidate, run=0, outcome=Outcome.OUT_OF_MEMORY, reason="full")
    ]
    assert RecordedDevice(recorded, seed=0)(plan(table.model, candidate)).outcome is Outcome.OUT_OF_MEMORY


def test_virtual_seconds_come_on_top_of_real_ones() -> None:
    clock = VirtualClock.over_real_time()
    before = clock()
    clock.advance(100.0)
    assert 100.0 <= clock() - before < 110.0
