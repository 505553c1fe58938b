"""The words and the data of every event that an exploration emits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bexp.explorer.cost.components import Component
from bexp.explorer.meshes.mesh import Mesh, MeshPlan
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.measurement import ComponentMeasurement, Conditions, Outcome
from bexp.explorer.records.recommendation import Answer, VariantAnswer, WholeModelCheck
from bexp.explorer.records.trial import TrialKind
from bexp.explorer.search.event_messages import (
    answer_changed_event,
    base_event,
    end_event,
    no_base_event,
    space_event,
    trial_event,
    variant_event,
    whole_model_event,
)
from bexp.explorer.search.suggestion import Suggestion
from tests.explorer.search.small import candidate, recommendation, small_request, small_space, trial, whole

GIB = 2**30
NAME = "micro_batch_size=1 bta_tile=off recompute=none attention=cudnn"


def component(kind: str, **changes: Any) -> Component:
    return Component.model_validate({"kind": kind, "micro_batch_size": 1, **changes})


def measured(of: Component, **changes: Any) -> ComponentMeasurement:
    made = {
        "component": of,
        "device_seconds": 0.0125,
        "host_seconds": 0.002,
        "forward_device_seconds": 0.005,
        "standard_error_seconds": 0.0,
        "repeats": 3,
        "saved_bytes": 0,
        "forward_peak_bytes": 0,
        "backward_peak_bytes": 0,
    }
    return ComponentMeasurement.model_validate({**made, **changes})


SUGGESTION = Suggestion(0, (component("head"), component("embedding")))


def test_a_variant_is_named_by_its_query_groups() -> None:
    (_, second) = small_request(num_query_groups=[4, 2]).space.variants()
    event = variant_event(second)
    assert event.code is EventCode.VARIANT
    assert event.message == "Exploring the variant with num_query_groups=2, a model of its own"
    assert event.data == {"num_query_groups": 2}


def test_the_space_is_told_with_what_was_left_out_and_why() -> None:
    event = space_event(small_space(small_request()).legal, 3, round(2.5 * GIB))
    assert event.code is EventCode.SPACE
    assert event.message == (
        "dense: 1,824,000 parameters, 12 candidates to consider, 3 more left out: predicted not to fit in 2.5 GiB"
    )
    assert (event.data["num_predicted_out"], event.data["memory_limit_bytes"]) == (3, round(2.5 * GIB))
    assert event.data["num_candidates"] == 12
    whole = space_event(small_space(small_request()).legal, 0, 8 * GIB)
    assert whole.message.endswith("12 candidates to consider, all predicted to fit in 8.0 GiB")


def test_the_base_says_when_it_is_not_the_plainest() -> None:
    assert base_event(candidate(), is_plainest=True).message == f"Base (1.00x): {NAME}"
    event = base_event(candidate(), is_plainest=False)
    assert event.code is EventCode.BASE
    assert event.message == f"Base (1.00x): {NAME}; the plainer ones do not fit or fail"
    assert event.data == {"candidate": candidate().model_dump(mode="json")}


def test_that_no_base_fits_is_a_warning() -> None:
    assert no_base_event().code is EventCode.WARNING
    assert no_base_event().message.startswith("No base candidate fits")


@pytest.mark.parametrize(
    ("number", "again", "words"),
    [(2, False, "2 new components"), (2, True, "2 components again"), (1, False, "1 new component")],
)
def test_a_trial_tells_throughput_peak_and_what_was_measured(number: int, again: bool, words: str) -> None:
    found = trial(7, tokens=1234.4).model_copy(update={"measured_peak_bytes": 3 * GIB, "predicted_peak_bytes": 2 * GIB})
    event = trial_event(found, Suggestion(0, SUGGESTION.components[:number], again=again), 1.26)
    assert event.code is EventCode.TRIAL
    assert event.message == f"Trial 7: {NAME}: 1,234 tokens/s, peak 3.0 GiB ({words} in 1.3 s)"
    assert event.data == {
        "trial": 7,
        "candidate": candidate().model_dump(mode="json"),
        "outcome": "ok",
        "tokens_per_second": 1234.4,
        "predicted_peak_bytes": 2 * GIB,
        "measured_peak_bytes": 3 * GIB,
    }


@pytest.mark.parametrize(("again", "words"), [(False, "measured"), (True, "measured again")])
def test_a_trial_of_a_whole_model_has_no_components_to_tell_of(again: bool, words: str) -> None:
    whole = candidate().model_copy(update={"attention_backend": OWN_ATTENTION})
    found = trial(7, tokens=1.0)
    found = found.model_copy(update={"measurement": found.measurement.model_copy(update={"candidate": whole})})
    assert trial_event(found, replace(SUGGESTION, again=again), 1.26).message.endswith(f"({words} in 1.3 s)")


def test_figures_that_are_not_measured_in_full_are_said_to_be_predicted() -> None:
    found = trial(7, tokens=1.0).model_copy(update={"predicted_peak_bytes": 2 * GIB})
    assert ": 1.0 tokens/s, peak 2.0 GiB, predicted in part (" in trial_event(found, SUGGESTION, 1.0).message
    assert ": 1.0 tokens/s, predicted in part (" in trial_event(trial(7, tokens=1.0), SUGGESTION, 1.0).message
    small = found.model_copy(update={"measured_peak_bytes": 5 * GIB // 1024})
    assert ": 1.0 tokens/s, peak 5.0 MiB (" in trial_event(small, SUGGESTION, 1.0).message
    assert (found.peak_bytes, small.peak_bytes) == (2 * GIB, 5 * GIB // 1024)


def test_an_infeasible_trial_tells_its_outcome_and_reason() -> None:
    event = trial_event(trial(3, outcome=Outcome.OUT_OF_MEMORY, reason="too much"), SUGGESTION, 1.0)
    assert event.code is EventCode.INFEASIBLE
    assert event.message == f"Infeasible: {NAME}: out_of_memory: too much"
    assert (event.data["outcome"], event.data["reason"]) == ("out_of_memory", "too much")
    silent = trial_event(trial(3, outcome=Outcome.CRASHED), SUGGESTION, 1.0)
    assert silent.message.endswith("crashed: no reason given")


def test_a_contaminated_trial_tells_which_components_are_not_learnt_from() -> None:
    hot = Conditions(clock_reasons=("hw_thermal_slowdown",))
    parts = (measured(component("head"), conditions=hot), measured(component("embedding"), conditions=Conditions()))
    event = trial_event(
        trial(3, outcome=Outcome.CONTAMINATED, reason="the device is throttled", components=parts), SUGGESTION, 1.0
    )
    assert event.code is EventCode.WARNING
    assert event.message == f"Contaminated: {NAME}: the device is throttled; not learnt from: head(m=1)"
    assert event.data["reason"] == "the device is throttled"


CHECK = WholeModelCheck(
    measurement=whole(peak_bytes=3 * GIB),
    tokens_per_second=1000.6,
    step_seconds=0.1,
    step_error=-0.0123,
    peak_error=0.045,
)
RUN = trial(9, kind=TrialKind.WHOLE_MODEL, whole_model=whole())


def test_a_whole_model_is_told_against_its_composition() -> None:
    event = whole_model_event(RUN, CHECK)
    assert event.code is EventCode.WHOLE_MODEL
    assert event.message == (
        f"Whole model with {NAME}: 1,001 tokens/s, peak 3.0 GiB; composed step -1.2%, composed peak +4.5%"
    )
    assert event.data["role"] == "recommended"
    assert event.data["check"] == CHECK.model_dump(mode="json")
    assert "probability_better" not in event.data


@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_a_runner_up_is_told_with_its_probability(probability: float) -> None:
    event = whole_model_event(RUN, CHECK, probability)
    percent = f"{100 * probability:.0f}%"
    assert event.message.startswith(f"Runner-up, {percent} likely to be better: whole model with micro_batch_size=1")
    assert (event.data["role"], event.data["probability_better"]) == ("runner_up", probability)


@pytest.mark.parametrize(
    ("better", "fits", "text"),
    [
        (None, 0.25, "No candidate fits as composed, 25% likely to fit: "),
        (0.004, 0.004, "Above the memory limit as composed, 0.4% likely to fit: "),
    ],
)
def test_a_whole_model_that_may_fit_is_told_with_the_probability_of_that(
    better: float | None, fits: float, text: str
) -> None:
    event = whole_model_event(RUN, CHECK, better, fits)
    assert event.message.startswith(text + "whole model with micro_batch_size=1")
    assert (event.data["role"], event.data["probability_fits"]) == ("may_fit", fits)


def test_a_whole_model_that_could_not_be_run_is_a_warning() -> None:
    failed = trial(9, outcome=Outcome.TIMED_OUT, reason="too slow", kind=TrialKind.WHOLE_MODEL)
    event = whole_model_event(failed, None)
    assert event.code is EventCode.WARNING
    assert event.message == f"Whole model with {NAME}: timed_out: too slow"
    assert (event.data["outcome"], event.data["reason"], event.data["trial"]) == ("timed_out", "too slow", 9)


def test_a_changed_answer_names_both_candidates_in_order() -> None:
    event = answer_changed_event(candidate(1), candidate(2))
    assert event.code is EventCode.ANSWER_CHANGED
    before, after = event.message.removeprefix("Whole models change the answer from ").split(" to ")
    assert (before, after) == (candidate(1).describe(), candidate(2).describe())
    assert (event.data["before"]["micro_batch_size"], event.data["after"]["micro_batch_size"]) == (1, 2)


def test_the_end_is_the_main_variants_recommendation() -> None:
    answer = Answer(variants=(VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=recommendation()),))
    event = end_event(answer, 87)
    assert event.code is EventCode.SUCCEEDED
    told = f"Recommended: {candidate(4).describe()}: 1,234 tokens/s, 1.25x base, confidence 87"
    assert event.message == told
    assert end_event(answer, 88).message == f"{told}, provisional: 88 was asked for"
    assert event.data == {"answer": answer.model_dump(mode="json")}


def test_the_end_of_a_search_of_meshes_names_the_best_and_says_whose_rate_it_is() -> None:
    plan = MeshPlan(
        mesh=Mesh(tensor=2, data=4, sharding=Sharding.ZERO1),
        base_mesh=Mesh(data=8),
        num_micro_batches=1,
        tokens_per_second=9872.0,
        compute_share=1.0,
        exchange_share=0.0,
        bubble_share=0.0,
        layers_per_stage=(4,),
        fullest_rank=0,
    )
    best = candidate(4, sharding=Sharding.ZERO1)
    found = recommendation().model_copy(update={"candidate": best, "plan": plan})
    event = end_event(Answer(variants=(VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=found),)), 80)
    assert event.message.startswith("Recommended: tensor=2 pipeline=1 data=4 sharding=zero1 micro_batch_size=4 ")
    assert event.message.count("sharding=") == 1
    assert "1,234 tokens/s of each device, 1.25x base" in event.message


@pytest.mark.parametrize(("reason", "words"), [(None, "no candidate fits"), ("the device burns", "the device burns")])
def test_an_end_without_a_recommendation_tells_the_reason(reason: str | None, words: str) -> None:
    none = VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=None, reason=reason)
    event = end_event(Answer(variants=(none,)), 95)
    assert event.code is EventCode.NOTHING_FITS
    assert event.message == f"No recommendation: {words}"
