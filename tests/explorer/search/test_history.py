"""The budget, and when a device is given up."""

from __future__ import annotations

import pytest

from bexp.explorer.model.model import Variant
from bexp.explorer.records.measurement import Outcome, PhaseSeconds
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.request.request import Budget
from bexp.explorer.search.history import HOPELESS_CONTAMINATED, TrialHistory
from tests.explorer.search.small import candidate, trial


def history(number: int, *, max_trials: int = 10, max_seconds: float = 86_400, variants: int = 1) -> TrialHistory:
    trials = [trial(i) for i in range(number)]
    return TrialHistory(trials, Budget(max_trials=max_trials, max_seconds=max_seconds), variants)


@pytest.mark.parametrize(
    ("number", "exhausted", "overdrawn"), [(9, False, False), (10, True, False), (19, True, False), (20, True, True)]
)
def test_the_budget_of_trials_ends_the_search_at_once_and_comparisons_at_twice_as_many(
    number: int, exhausted: bool, overdrawn: bool
) -> None:
    found = history(number)
    assert (found.exhausted(0), found.overdrawn(0)) == (exhausted, overdrawn)


@pytest.mark.parametrize(
    ("number", "exhausted", "overdrawn"), [(4, False, False), (5, True, False), (9, True, False), (10, True, True)]
)
def test_the_budget_of_seconds_counts_suggestions_too(number: int, exhausted: bool, overdrawn: bool) -> None:
    trials = [trial(i, seconds=1.5).model_copy(update={"suggest_seconds": 0.5}) for i in range(number)]
    found = TrialHistory(trials, Budget(max_seconds=10, max_trials=1000), 1)
    assert (found.exhausted(0), found.overdrawn(0)) == (exhausted, overdrawn)


def test_each_variant_has_its_share_of_the_budget_and_what_earlier_ones_left() -> None:
    found = history(5, variants=2)
    assert found.exhausted(0)
    assert not found.exhausted(1)
    assert (found.trials_left(0), found.trials_left(1)) == (0, 5)


def test_device_seconds_leave_out_process_starts() -> None:
    phases = PhaseSeconds(process_start=5, build=1, warm_up=2, timed=3, messaging=0.5)
    found = TrialHistory([trial(0, phases=phases), trial(1, phases=phases)], Budget(), 1)
    assert found.device_seconds == 2 * 6.5


def failures(number: int, outcome: Outcome = Outcome.CRASHED, reason: str = "no compiler") -> list[Trial]:
    return [trial(i, outcome=outcome, reason=reason) for i in range(number)]


def is_hopeless(*trials: Trial) -> bool:
    return TrialHistory(trials, Budget(), 1).is_hopeless(Variant(4))


def test_a_contaminated_device_is_given_up_after_twelve_trials() -> None:
    assert HOPELESS_CONTAMINATED == 12
    contaminated = [trial(i, outcome=Outcome.CONTAMINATED, reason=str(i)) for i in range(12)]
    assert is_hopeless(*contaminated)
    assert not is_hopeless(*contaminated[1:])
    assert not is_hopeless(trial(99), *contaminated[1:])
    assert not is_hopeless(*contaminated, trial(99))


def test_failures_of_one_component_do_not_make_a_device_hopeless() -> None:
    from bexp.explorer.cost.components import Component, ComponentKind

    broken = Component(kind=ComponentKind.HEAD, micro_batch_size=1)
    trials = [trial(i, outcome=Outcome.CRASHED, reason="x", failed_component=broken) for i in range(9)]
    assert not is_hopeless(*trials)


def test_variants_are_told_apart_by_their_query_groups() -> None:
    other = candidate(num_query_groups=1)
    found = TrialHistory([trial(0), trial(1, other), *failures(5)], Budget(), 2)
    assert [t.number for t in found.trials_of(Variant(1))] == [1]
    assert not found.is_hopeless(Variant(1))
    assert found.commonest_failure(Variant(1)) is None
    assert found.commonest_failure(Variant(4)) == "crashed: no compiler"


def test_the_commonest_failure_is_named_with_its_reason() -> None:
    trials = [*failures(1, reason="rare"), *failures(2, outcome=Outcome.TIMED_OUT, reason="slow"), trial(9)]
    assert TrialHistory(trials, Budget(), 1).commonest_failure(Variant(4)) == "timed_out: slow"
    nameless = [trial(0, outcome=Outcome.CRASHED)]
    assert TrialHistory(nameless, Budget(), 1).commonest_failure(Variant(4)) == "crashed: no reason given"


def test_of_several_whole_model_runs_the_first_sound_one_counts() -> None:
    outcomes = (Outcome.CONTAMINATED, Outcome.OK, Outcome.OK)
    runs = [trial(i, outcome=outcome, kind=TrialKind.WHOLE_MODEL) for i, outcome in enumerate(outcomes)]
    assert TrialHistory([trial(7), *runs], Budget(), 1).whole_model(candidate()) == runs[1]
    assert TrialHistory(runs[:1], Budget(), 1).whole_model(candidate()) == runs[0]
