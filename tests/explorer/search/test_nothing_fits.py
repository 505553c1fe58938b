"""Searches in which no candidate fits as composed: what is nearest to fitting is run whole before they give up."""

from __future__ import annotations

from functools import cache

from explorer.cost_model.step import GIB, required_bytes
from explorer.records.event import EventCode
from explorer.records.measurement import Measurement, Outcome
from explorer.records.trial import Trial, TrialKind, TrialPlan
from explorer.search.feasibility import MOST_TOO_LARGE
from explorer.search.search_state import SearchState
from explorer.spec.candidate import Candidate
from explorer.spec.request import ExplorationRequest
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
def measured() -> tuple[SearchState, tuple[Candidate, ...]]:
    """The state that has measured every candidate, and these."""
    req = asked()
    assert req.model is not None
    space = pruned(req.model, req, DEVICE)
    assert space.table is not None
    state = SearchState(space.table, space.legal.candidates, req, DEVICE.hardware)
    for number, each in enumerate(space.legal.candidates):
        missing = state.missing(state.table.row[each])
        state.learn_trials([(number, measure(state, missing, each))])
    return state, space.legal.candidates


def limit_gib(over: float) -> float:
    """A limit that the composed peaks exceed by a share of themselves."""
    state, candidates = measured()
    peak = state.bytes(state.table.row[candidates[0]]).peak
    return required_bytes(round((1.0 - over) * peak), DEVICE.hardware, state.request.allocator) / GIB


class PeaksOff(SimulatedDevice):
    """The whole models of `factors` need so much of their composed peaks and run; all others run out of memory."""

    factors: dict[Candidate, float]

    def _whole_model(self, plan: TrialPlan) -> Measurement:
        found = super()._whole_model(plan)
        if plan.candidate not in self.factors or found.whole_model is None:
            return Measurement(candidate=plan.candidate, outcome=Outcome.OUT_OF_MEMORY, reason="simulated")
        peak = round(self.factors[plan.candidate] * found.whole_model.peak_bytes)
        return found.model_copy(update={"whole_model": found.whole_model.model_copy(update={"peak_bytes": peak})})


def explored(factors: dict[Candidate, float], over: float) -> tuple[list[Trial], object, str]:
    """The whole models of a search, its recommendation, and the message that ends it without one."""
    device = PeaksOff(asked(memory_limit_gib=limit_gib(over)), noise=0.0)
    device.factors = factors
    steps = run(device.request, device)
    answer = answer_of(steps)
    whole = [t for t in trials_of(steps) if t.kind is TrialKind.WHOLE_MODEL]
    found = answer.recommendation
    return whole, None if found is None else found.candidate, " ".join(lines(steps, EventCode.NOTHING_FITS))


def test_the_likeliest_to_fit_are_run_whole_before_a_search_gives_up() -> None:
    _, candidates = measured()
    fits = candidates[3]
    whole, found, _ = explored({**dict.fromkeys(candidates, 1.0), fits: 0.98}, over=0.0005)
    assert found == fits
    assert all(t.measurement.outcome is Outcome.OK for t in whole), "those that leave too little room run, too"


def test_a_whole_model_that_is_too_large_leaves_others_within_the_error_of_memory() -> None:
    _, candidates = measured()
    fits = candidates[3]
    whole, found, _ = explored({fits: 0.98}, over=0.0005)
    assert found == fits
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
