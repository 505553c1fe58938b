"""Words of events that no recorded log has."""

from __future__ import annotations

import pytest

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.records.recommendation import WholeModelCheck
from bexp.explorer.records.trial import TrialKind
from bexp.explorer.search.event_messages import trial_event, whole_model_event
from bexp.explorer.search.suggestion import Suggestion
from tests.explorer.search.small import candidate, trial, whole


@pytest.mark.parametrize(("again", "words"), [(False, "measured"), (True, "measured again")])
def test_a_trial_of_a_whole_model_has_no_components_to_tell_of(again: bool, words: str) -> None:
    found = trial(7, candidate(attention_backend=OWN_ATTENTION), tokens=1.0)
    suggestion = Suggestion(0, (Component(kind=ComponentKind.HEAD, micro_batch_size=1),), again=again)
    assert trial_event(found, suggestion, 1.26).message.endswith(f"({words} in 1.3 s)")


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
    check = WholeModelCheck(
        measurement=whole(), tokens_per_second=1.0, step_seconds=0.1, step_error=0.0, peak_error=0.0
    )
    ran = trial(9, kind=TrialKind.WHOLE_MODEL, whole_model=whole())
    event = whole_model_event(ran, check, better, fits)
    assert event.message.startswith(text + "whole model with micro_batch_size=1")
    assert (event.data["role"], event.data["probability_fits"]) == ("may_fit", fits)
