"""An exploration on a device where something does not fit, crashes or is refused."""

from __future__ import annotations

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import TrialKind, TrialTask
from tests.explorer.explorations import answer_of, lines, request, run, trials_of
from tests.explorer.simulator import SimulatedDevice, report


def test_base_falls_back_to_recomputation_where_it_must() -> None:
    req = request(base_micro_batch_size=12, micro_batch_size={"explore": {"min": 1, "max": 16}}, memory_limit_gib=14)
    steps = run(req, SimulatedDevice(req))
    found = answer_of(steps).recommendation
    assert found is not None
    assert found.base.micro_batch_size == 12
    assert found.base.recompute is Recompute.FULL
    assert any("plainer ones do not fit" in line for line in lines(steps, EventCode.BASE))


def test_nothing_fits_names_the_smallest_change() -> None:
    req = request(
        memory_limit_gib=12, micro_batch_size=64, attention_backends=None, recompute=["none"], bta={"enable": False}
    )
    steps = run(req, SimulatedDevice(req))
    answer = answer_of(steps)
    assert answer.recommendation is None
    assert "would fit with micro_batch_size" in str(answer.variants[0].reason)
    assert lines(steps, EventCode.NOTHING_FITS)


def test_nothing_fits_when_the_state_alone_is_too_large() -> None:
    req = request(memory_limit_gib=4)
    reason = answer_of(run(req, SimulatedDevice(req))).variants[0].reason
    assert reason is not None
    assert "training state alone" in reason
    assert "zero3 over" in reason


def test_whole_model_out_of_memory_moves_the_recommendation() -> None:
    req = request()
    device = SimulatedDevice(req)
    device.whole_model_outcomes = [Outcome.OUT_OF_MEMORY]
    steps = run(req, device)
    whole = [t for t in trials_of(steps) if t.kind is TrialKind.WHOLE_MODEL]
    found = answer_of(steps).recommendation
    assert found is not None
    assert found.candidate == whole[1].candidate != whole[0].candidate
    rejected = whole[0].candidate
    assert all(t.candidate.micro_batch_size <= rejected.micro_batch_size for t in whole[1:])


def test_a_whole_model_that_does_not_fit_rules_out_all_that_need_as_much() -> None:
    req = request()
    device = SimulatedDevice(req)
    device.whole_model_outcomes = [Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_MEMORY]
    steps = run(req, device)
    peaks = [t.predicted_peak_bytes for t in trials_of(steps) if t.kind is TrialKind.WHOLE_MODEL]
    assert len(peaks) in {3, 4}, "a likely rival may follow"
    assert peaks[0] is not None and peaks[1] is not None and peaks[2] is not None
    assert peaks[0] > peaks[1] > peaks[2]
    found = answer_of(steps).recommendation
    assert found is not None
    assert found.whole_model is not None


def test_a_whole_model_that_crashes_is_not_recommended() -> None:
    req = request()
    device = SimulatedDevice(req)
    device.whole_model_outcomes = [Outcome.CRASHED]
    steps = run(req, device)
    crashed = next(t for t in trials_of(steps) if t.kind is TrialKind.WHOLE_MODEL)
    found = answer_of(steps).recommendation
    assert found is not None
    assert found.candidate != crashed.candidate
    assert found.whole_model is not None


class BrokenDevice(SimulatedDevice):
    """Nothing runs, for a reason that is no candidate's."""

    def __call__(self, task: TrialTask) -> Measurement:
        self.plans.append(task)
        return Measurement(candidate=task.candidate, outcome=Outcome.UNSUPPORTED, reason="no C compiler")


def test_a_device_that_runs_nothing_is_given_up_soon_and_for_its_own_reason() -> None:
    req = request()
    device = BrokenDevice(req)
    answer = answer_of(run(req, device))
    assert len(device.plans) <= 6
    assert answer.recommendation is None
    assert "no C compiler" in str(answer.variants[0].reason)
    assert "fit" not in str(answer.variants[0].reason)


def test_the_space_is_told_even_if_nothing_is_tried() -> None:
    steps = run(request(memory_limit_gib=1), SimulatedDevice(request()))
    assert lines(steps, EventCode.SPACE)
    assert any(step.space for step in steps)


def test_a_device_that_refuses_the_model_answers_so_at_once() -> None:
    refusing = report().model_copy(update={"refusal": "no such layer"})
    (step,) = run(request(), SimulatedDevice(request()), rep=refusing)
    assert step.trial is None
    (variant,) = answer_of([step]).variants
    assert variant.reason == "no such layer"
    assert variant.recommendation is None
    assert [event.code.ends_job for event in step.events] == [True]
