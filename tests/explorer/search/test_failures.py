"""An exploration on a device where something does not fit, crashes or is refused."""

from __future__ import annotations

from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.trial import TrialKind
from tests.explorer.explorations import answer_of, best_of, request, run, trials_of
from tests.explorer.simulator import SimulatedDevice, report


def test_a_whole_model_that_does_not_fit_rules_out_all_that_need_as_much() -> None:
    req = request()
    device = SimulatedDevice(req)
    device.whole_model_outcomes = [Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_MEMORY]
    steps = run(req, device)
    peaks = [t.predicted_peak_bytes for t in trials_of(steps) if t.kind is TrialKind.WHOLE_MODEL]
    assert len(peaks) in {3, 4}, "a likely rival may follow"
    assert peaks[0] is not None and peaks[1] is not None and peaks[2] is not None
    assert peaks[0] > peaks[1] > peaks[2]
    found = best_of(steps)
    assert found.whole_model is not None


def test_a_device_that_refuses_the_model_answers_so_at_once() -> None:
    refusing = report().model_copy(update={"refusal": "no such layer"})
    (step,) = run(request(), SimulatedDevice(request()), rep=refusing)
    assert step.trial is None
    (variant,) = answer_of([step]).variants
    assert variant.reason == "no such layer"
    assert variant.recommendation is None
    assert [event.code.ends_job for event in step.events] == [True]
