"""Whether one candidate is faster than another: what the probability, the interval and the runs needed say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.random import Generator

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import Conditions, Measurement, Outcome, WholeModelMeasurement
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.comparison import KNOWN, ComparedSide, MeasuredCandidate, compare, throughput_curve
from tests.api.cli.samples import BASE, BEST, RECOMMENDATION

UNCHECKED = RECOMMENDATION.model_copy(update={"whole_model": None})


def whole_run(
    number: int, tokens_per_second: float, error: float = 0.001, conditions: Conditions | None = None
) -> Trial:
    whole = WholeModelMeasurement(
        micro_step_seconds=0.01,
        optimizer_seconds=0.0,
        standard_error_seconds=0.01 * error,
        peak_bytes=1,
        reserved_bytes=1,
        repeats=3,
        conditions=conditions,
    )
    measurement = Measurement(candidate=BEST, outcome=Outcome.OK, whole_model=whole)
    return Trial(
        number=number, kind=TrialKind.WHOLE_MODEL, measurement=measurement, tokens_per_second=tokens_per_second
    )


def side(*speeds: float, noise: float = 0.01) -> ComparedSide:
    trials = [whole_run(number, speed) for number, speed in enumerate(speeds)]
    return MeasuredCandidate(UNCHECKED, noise, trials, "cuda").side()


def test_equal_speeds_are_a_coin_toss_and_the_sides_add_up() -> None:
    assert compare(side(100.0), side(100.0)).probability_b_faster == pytest.approx(0.5)
    forth, back = compare(side(100.0), side(103.0)), compare(side(103.0), side(100.0))
    assert forth.probability_b_faster + back.probability_b_faster == pytest.approx(1.0)
    assert forth.speedup_90_percent[0] == pytest.approx(1.0 / back.speedup_90_percent[1])
    assert forth.runs_needed == back.runs_needed


def composed(number: int, candidate: Candidate, tokens_per_second: float) -> Trial:
    measurement = Measurement(candidate=candidate, outcome=Outcome.OK)
    return Trial(number=number, kind=TrialKind.COMPONENTS, measurement=measurement, tokens_per_second=tokens_per_second)


def test_a_curve_leads_through_the_compared_speed_and_a_whole_run_counts_more_than_what_parts_compose() -> None:
    size = BEST.micro_batch_size
    other, another = (BEST.model_copy(update={"micro_batch_size": size + more}) for more in (1, 2))
    variant = other.model_copy(update={"num_query_groups": BEST.num_query_groups + 1})
    at_other = whole_run(3, 90.0)
    trials = [
        *(whole_run(0, 100.0), whole_run(1, 102.0), composed(2, other, 95.0)),
        at_other.model_copy(update={"measurement": at_other.measurement.model_copy(update={"candidate": other})}),
        *(
            composed(4, other, 96.0),
            composed(5, another, 80.0),
            composed(6, another, 81.0),
            composed(7, variant, 999.0),
            composed(8, another.model_copy(update={"bta_tile": 1}), 85.0),
        ),
    ]
    compared = side(100.0, 102.0)
    curve = throughput_curve(UNCHECKED, compared, trials, lambda trial: trial.number != 8)
    shown = [(point.micro_batch_size, point.tokens_per_second, point.is_measured_whole) for point in curve]
    assert shown == [
        (size, compared.tokens_per_second, True),
        (size + 1, 90.0, True),
        (size + 2, 81.0, False),
    ], "a candidate that fits goes before a faster one that does not"
    assert all(point.fits for point in curve)
    none_else_fits = throughput_curve(UNCHECKED, compared, trials, lambda _: False)
    assert [(point.tokens_per_second, point.fits) for point in none_else_fits[1:]] == [(90.0, False), (85.0, False)]


def test_more_runs_and_larger_differences_are_surer() -> None:
    few, many = compare(side(100.0), side(103.0)), compare(side(*[100.0] * 6), side(*[103.0] * 6))
    assert 0.5 < few.probability_b_faster < many.probability_b_faster
    assert few.probability_b_faster < compare(side(100.0), side(120.0)).probability_b_faster
    assert compare(side(100.0), side(100.001)).runs_needed is None


def test_the_runs_needed_suffice() -> None:
    """Further runs like the first ones, as many as were said to be needed, leave nothing more to do."""
    needed = compare(side(100.0), side(102.0)).runs_needed
    assert needed is not None and 1 < needed < 20
    after = compare(side(*[100.0] * (1 + needed)), side(*[102.0] * (1 + needed)))
    assert after.probability_b_faster >= KNOWN and after.runs_needed == 0


@pytest.mark.parametrize("number", [1, 3])
def test_the_probability_is_as_often_right_as_it_says(number: int) -> None:
    """Of drawn pairs with 90% and more, at least so many are in the order that it says."""
    rng: Generator = np.random.default_rng(5)
    right = []
    for _ in range(400):
        truth = rng.normal(0.0, 0.02, 2)
        a, b = (side(*np.exp(5.0 + mean + rng.normal(0.0, 0.011, number)), noise=0.01) for mean in truth)
        probability = compare(a, b).probability_b_faster
        if max(probability, 1.0 - probability) >= 0.9:
            right.append((probability > 0.5) == (truth[1] > truth[0]))
    assert len(right) > 20 and np.mean(right) >= 0.9


def test_runs_that_differ_widen_the_interval() -> None:
    steady, unsteady = side(100.0, 100.0, 100.0), side(90.0, 100.0, 111.0)
    assert unsteady.run_noise > 3 * steady.run_noise
    assert unsteady.tokens_per_second == pytest.approx(math.prod((90.0, 100.0, 111.0)) ** (1 / 3))


def test_without_runs_the_composed_speed_counts_with_its_error() -> None:
    composed = MeasuredCandidate(UNCHECKED, 0.01, [], "cuda").side()
    assert (composed.num_runs, composed.tokens_per_second) == (0, UNCHECKED.tokens_per_second)
    assert composed.standard_error > side(100.0).standard_error
    reused = MeasuredCandidate(RECOMMENDATION, 0.01, [], "cuda").side()
    assert reused.num_runs == 1 and reused.tokens_per_second == pytest.approx(11_500.0)
    other = whole_run(1, 50.0).model_copy(
        update={"measurement": Measurement(candidate=BASE, outcome=Outcome.CRASHED, reason="no")}
    )
    assert MeasuredCandidate(RECOMMENDATION, 0.01, [other], "cuda").side() == reused
