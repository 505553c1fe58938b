"""How Optuna sees a trial."""

from __future__ import annotations

import pytest
from optuna.trial import TrialState

from bexp.explorer.records.measurement import Outcome
from bexp.explorer.search.optuna_trials import (
    DIMENSIONS,
    FEASIBLE,
    MEASUREMENT,
    REASON,
    TRIAL_NUMBER,
    distributions,
    frozen_trial,
    read_measurement,
    to_candidate,
    to_params,
)
from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.variant import Variant
from tests.explorer.search.small import candidate, small_state, trial


@pytest.mark.parametrize(
    ("outcome", "tokens", "state", "value", "violation"),
    [
        (Outcome.OK, 12.5, TrialState.COMPLETE, 12.5, -1.0),
        (Outcome.OK, None, TrialState.FAIL, None, -1.0),
        (Outcome.CONTAMINATED, None, TrialState.FAIL, None, 1.0),
        (Outcome.OUT_OF_MEMORY, None, TrialState.COMPLETE, 0.0, 1.0),
        (Outcome.CRASHED, None, TrialState.COMPLETE, 0.0, 1.0),
    ],
)
def test_a_stored_trial_has_a_value_only_if_it_tells_something_of_its_candidate(
    outcome: Outcome, tokens: float | None, state: TrialState, value: float | None, violation: float
) -> None:
    stored = trial(5, candidate(2), outcome, tokens=tokens)
    found = frozen_trial(stored, distributions([candidate(1), candidate(2)]))
    assert (found.state, found.value if value is not None else None) == (state, value)
    assert found.constraints == {FEASIBLE: violation}
    assert found.user_attrs[TRIAL_NUMBER] == 5
    assert read_measurement(found) == (5, stored.measurement)
    assert to_candidate(found.params, Variant(4)) == candidate(2)


def test_a_trial_without_a_measurement_is_not_read() -> None:
    found = frozen_trial(trial(0), distributions([candidate()]))
    found.user_attrs.pop("measurement")
    assert read_measurement(found) is None


def test_every_candidate_survives_the_way_through_parameters() -> None:
    candidates = small_state().table.candidates
    space = distributions(candidates)
    assert tuple(space) == DIMENSIONS
    for each in candidates:
        params = to_params(each)
        assert to_candidate(params, each.variant) == each
        for name, value in params.items():
            assert value in space[name].choices  # type: ignore[attr-defined]  # all are categorical
    assert to_params(candidate(recompute=Recompute.FULL))["recompute"] == "full"


def test_names_in_stored_studies_stay_as_they_are() -> None:
    assert (MEASUREMENT, TRIAL_NUMBER, REASON, FEASIBLE) == ("measurement", "bexp_trial", "reason", "feasible")
