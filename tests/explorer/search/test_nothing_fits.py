"""Searches in which no candidate fits as composed: what is nearest to fitting is run whole before they give up."""

from __future__ import annotations

from functools import cache

import pytest

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.cost.step import GIB, required_bytes
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.explorer.records.run_report import ReportedRun
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.history import HOPELESS_FAILURES
from bexp.explorer.search.knowledge import MOST_TOO_LARGE
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.relaxations import SmallestCandidate, find_relaxations
from tests.explorer.explorations import answer_of, lines, pruned, request, run, trials_of
from tests.explorer.search.small import measure
from tests.explorer.simulator import SimulatedDevice, report

DEVICE = report(memory_gib=40)


def asked(**changes: object) -> ExplorationRequest:
    """Six candidates with one and the same peak: neither back end changes what is kept."""
    return request(
        micro_batch_size=[8],
        attention_backends=["cudnn", "flash"],
        recompute=["none"],
        bta={"enable": False},
        **changes,
    )


@cache
def measured() -> tuple[Posterior, tuple[Candidate, ...]]:
    """The state that has measured every candidate, and these."""
    req = asked()
    assert req.model is not None
    space = pruned(req.model, req, DEVICE)
    assert space.table is not None
    state = Posterior(space.table, space.legal.candidates, req, DEVICE.hardware)
    for number, each in enumerate(space.legal.candidates):
        missing = state.missing(state.table.row[each])
        state.knowledge.learn(number, measure(state, missing, each))
    return state, space.legal.candidates


def limit_gib(over: float) -> float:
    """A limit that the composed peaks exceed by a share of themselves."""
    state, candidates = measured()
    peak = state.bytes(state.table.row[candidates[0]]).peak
    return required_bytes(round((1.0 - over) * peak), DEVICE.hardware, state.request.allocator) / GIB


class PeaksOff(SimulatedDevice):
    """The whole models of `factors` need so much of their composed peaks and run; all others end as in `failure`."""

    factors: dict[Candidate, float]
    failure = Outcome.OUT_OF_MEMORY

    def _whole_model(self, task: TrialTask) -> Measurement:
        found = super()._whole_model(task)
        if task.candidate not in self.factors or found.whole_model is None:
            return Measurement(candidate=task.candidate, outcome=self.failure, reason="simulated")
        peak = round(self.factors[task.candidate] * found.whole_model.peak_bytes)
        return found.model_copy(update={"whole_model": found.whole_model.model_copy(update={"peak_bytes": peak})})


def explored(
    factors: dict[Candidate, float], over: float, failure: Outcome = Outcome.OUT_OF_MEMORY
) -> tuple[list[Trial], Recommendation | None, str]:
    """The whole models of a search, its recommendation, and the message that ends it without one."""
    device = PeaksOff(asked(memory_limit_gib=limit_gib(over)), noise=0.0)
    device.factors, device.failure = factors, failure
    steps = run(device.request, device)
    whole = [t for t in trials_of(steps) if t.kind is TrialKind.WHOLE_MODEL]
    told = [*lines(steps, EventCode.WHOLE_MODEL), *lines(steps, EventCode.WARNING)]
    assert sum("% likely to fit: whole model with" in line for line in told) == len(whole)
    again = run(device.request, device, history=trials_of(steps)[: -len(whole) // 2] if whole else ())
    assert answer_of(again) == answer_of(steps), "a resumed search goes the same way"
    return whole, answer_of(steps).recommendation, " ".join(lines(steps, EventCode.NOTHING_FITS))


def test_the_likeliest_to_fit_are_run_whole_before_a_search_gives_up() -> None:
    _, candidates = measured()
    fits = candidates[3]
    whole, found, _ = explored({**dict.fromkeys(candidates, 1.0), fits: 0.98}, over=0.0005)
    assert found is not None and found.candidate == fits
    assert all(t.measurement.outcome is Outcome.OK for t in whole), "those that leave too little room run, too"
    assert len(whole) > 1
    assert found.alternative(Role.RUNNER_UP) is None, "none of them could be recommended, however fast it is"


def test_a_whole_model_that_is_too_large_leaves_others_within_the_error_of_memory() -> None:
    tried, _, _ = explored({}, over=0.0005)
    fits = tried[1].candidate
    whole, found, _ = explored({fits: 0.98}, over=0.0005)
    assert found is not None and found.candidate == fits
    assert whole[0].measurement.outcome is Outcome.OUT_OF_MEMORY


def test_after_a_few_that_are_too_large_the_answer_names_the_smallest_peak_and_what_would_help() -> None:
    whole, found, message = explored({}, over=0.0005)
    assert found is None
    assert len(whole) == MOST_TOO_LARGE
    state, candidates = measured()
    peak = state.bytes(state.table.row[candidates[0]]).peak
    assert f"no candidate fits in {limit_gib(0.0005):.2f} GiB" in message
    assert f"has a peak of {peak / GIB:.2f} GiB and needs" in message
    assert "its whole model ran out of memory. It would fit with micro_batch_size 4 (" in message


def test_what_is_hardly_likely_to_fit_is_not_tried() -> None:
    whole, found, message = explored({}, over=0.05)
    assert (whole, found) == ([], None)
    assert "ran out of memory" not in message
    assert "It would fit with micro_batch_size 4 (" in message


def test_whole_models_that_all_crash_for_one_reason_end_the_search() -> None:
    whole, found, _ = explored({}, over=0.0005, failure=Outcome.CRASHED)
    assert (len(whole), found) == (HOPELESS_FAILURES, None)


class Cramped(SimulatedDevice):
    """Attention runs out of memory."""

    def __call__(self, task: TrialTask) -> Measurement:
        return Measurement(
            candidate=task.candidate,
            outcome=Outcome.OUT_OF_MEMORY,
            reason="simulated",
            failed_component=next(c for c in task.components if c.kind is ComponentKind.ATTENTION),
        )


def test_a_budget_that_ends_early_is_no_reason_to_say_that_nothing_fits() -> None:
    """The base and another attention ran out of memory, and a third was not tried."""
    req = request(
        micro_batch_size=[8],
        attention_backends=["cudnn", "flash", "efficient"],
        recompute=["none"],
        bta={"enable": False},
        budget={"max_trials": 1},
    )
    steps = run(req, Cramped(req, noise=0.0))
    (message,) = lines(steps, EventCode.NOTHING_FITS)
    assert "no candidate fits" not in message
    assert "out_of_memory: simulated" in message


def test_what_ran_out_of_memory_below_the_limit_is_said_so() -> None:
    req = asked()
    (message,) = lines(run(req, Cramped(req, noise=0.0)), EventCode.NOTHING_FITS)
    assert "has an expected peak of" in message
    assert "a component of it ran out of memory" in message


def test_a_peak_below_the_limit_that_real_runs_exceed_is_said_so() -> None:
    state, candidates = measured()
    told = ReportedRun(exploration_id="e", candidate=candidates[0], num_reports=1, speed_ratio=1.0, peak_ratio=1.2)
    req = asked(memory_limit_gib=limit_gib(-0.1))
    steps = run(req, SimulatedDevice(req, noise=0.0), rep=DEVICE.model_copy(update={"reported_runs": (told,)}))
    (message,) = lines(steps, EventCode.NOTHING_FITS)
    assert "and real runs needed at least 1.20x the composed memory" in message
    peak = state.bytes(state.table.row[candidates[0]]).peak
    one, more = (
        find_relaxations(req, DEVICE, state.table.model, SmallestCandidate(candidates[0], peak, 0, reported_factor=f))[
            0
        ]
        for f in (1.15, 1.2)
    )
    assert more.predicted_peak_bytes == pytest.approx(1.2 / 1.15 * one.predicted_peak_bytes)
