"""The best candidate that divides the batch, and how much memory can be saved near the fastest."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.records.recommendation import Alternative, Role
from bexp.explorer.search.alternatives import (
    compare,
    dividing_batch_sizes,
    expected_tokens_per_second,
    memory_rows,
    promising_row,
    recommend_dividing,
)
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.whole_models import next_comparison
from tests.explorer.alternatives import other_of
from tests.explorer.explorations import best_of, request, run
from tests.explorer.search.small import MODEL, REPORT, candidate, know, small_state
from tests.explorer.simulator import SimulatedDevice


def state_of(*known: int, **changes: Any) -> Posterior:
    """A state that knows all candidates of some sizes; the larger, the faster."""
    state = small_state(**changes)
    know(state, *(c for c in state.table.candidates if c.micro_batch_size in known))
    return state


def find(state: Posterior) -> Alternative | None:
    best, dividing = state.recommend(), recommend_dividing(state)
    assert best is not None
    return None if dividing is None else compare(state, best.row, Role.DIVIDING, dividing.row, None)


def memory(state: Posterior, recommended: int) -> list[Alternative]:
    """The fastest candidate, and smaller peaks near it."""
    rows = memory_rows(state, recommended)
    return [compare(state, recommended, role, row, None) for role, row in rows.items()]


def test_a_recommended_candidate_that_divides_is_the_second_figure_too() -> None:
    state = state_of(1, 2, 4, batch_size=12)
    best, found = state.recommend(), find(state)
    assert best is not None
    assert found is not None
    assert state.table.candidates[best.row] == found.candidate
    assert (found.candidate.micro_batch_size, found.grad_accum_steps, found.loss) == (4, 3, 0.0)
    assert not found.predicted
    among = recommend_dividing(state)
    assert among is not None and among.confidence >= best.confidence


def test_none_is_found_if_the_batch_has_no_divisor_in_the_space() -> None:
    state = state_of(2, 4, micro_batch_size=[2, 4], batch_size=15)
    assert find(state) is None
    assert dividing_batch_sizes(state) == (14, 16)
    assert find(state_of(4, micro_batch_size=[4], batch_size=22)) is None
    assert dividing_batch_sizes(state_of(4, micro_batch_size=[4], batch_size=22)) == (20, 24)
    uneven = state_of(1, 2, batch_size=15, num_devices=2)
    assert find(uneven) is None
    assert dividing_batch_sizes(uneven) == (14, 16)


def test_a_whole_model_that_ran_slower_is_not_listed_as_near_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bexp.explorer.search.alternatives.WITHIN", {Role.WITHIN_1_PERCENT: 0.2})
    state = state_of(1, 2, 4, tolerance=0.2, prefer="memory")  # it keeps the smaller ones among the contenders
    four = state.table.row[candidate(4)]
    assert memory(state, four)[-1].candidate.micro_batch_size == 2
    reached = state.seconds(four).tokens_per_second
    state.knowledge.learn_whole_model(candidate(4), reached, 0.001)
    state.knowledge.learn_whole_model(candidate(2), 0.75 * reached, 0.5)  # so uncertain that the search expects more
    fastest, near = memory(state, four)
    assert (fastest.candidate.micro_batch_size, near.ratio <= 1.25 * fastest.ratio) == (4, True)


def test_the_fastest_is_the_recommended_one_whatever_the_search_expects_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bexp.explorer.search.posterior.LEAST_SHARE", 0.5)  # slower ones stay contenders
    state = state_of(1, 2, 4)
    reached = state.seconds(state.table.row[candidate(4)]).tokens_per_second
    state.knowledge.learn_whole_model(candidate(4), reached, 0.001)
    state.knowledge.learn_whole_model(candidate(2), 1.02 * reached, 0.2)  # so uncertain that the search expects less
    best, incumbent = state.recommend(), state.contenders.incumbent
    assert best is not None
    assert incumbent is not None
    assert state.table.candidates[int(state.contenders.rows[incumbent])].micro_batch_size == 4
    assert memory(state, best.row)[0].candidate == state.table.candidates[best.row] == candidate(2)


def test_what_was_not_run_whole_is_at_most_as_fast_as_what_was() -> None:
    """The whole model of the recommended candidate sets its figure, and that is the same throughout an answer."""
    state = state_of(1, 2, 4, prefer="memory", tolerance=0.2)
    one, two, four = (state.table.row[candidate(size)] for size in (1, 2, 4))
    best = state.recommend()
    assert best is not None and best.row == two
    unchecked = state.seconds(two).tokens_per_second
    assert unchecked < expected_tokens_per_second(state, four, two) == memory(state, two)[0].tokens_per_second
    state.knowledge.learn_whole_model(candidate(2), 0.7 * unchecked, 0.001)
    assert expected_tokens_per_second(state, two, two) == pytest.approx(0.7 * unchecked)
    for beside in (one, four):  # composed figures stay as far apart, where that is below
        share = state.seconds(beside).tokens_per_second / unchecked
        assert expected_tokens_per_second(state, beside, two) == pytest.approx(
            0.7 * unchecked * min(share, 1.0), rel=1e-2
        )
    fastest, *_ = memory(state, two)
    assert fastest.candidate == candidate(2)
    assert fastest.tokens_per_second == pytest.approx(0.7 * unchecked)
    state.knowledge.learn_whole_model(candidate(4), 0.71 * unchecked, 0.001)
    assert expected_tokens_per_second(state, four, two) == pytest.approx(0.71 * unchecked), "that was run whole"


@pytest.mark.parametrize(("tolerance", "size"), [(0.001, 4), (0.2, 2)])
def test_who_prefers_memory_gets_the_smallest_peak_within_the_tolerance(tolerance: float, size: int) -> None:
    speed = state_of(1, 2, 4, tolerance=tolerance)
    saving = state_of(1, 2, 4, tolerance=tolerance, prefer="memory")
    fastest, chosen = speed.recommend(), saving.recommend()
    assert fastest is not None
    assert chosen is not None
    found = saving.table.candidates[chosen.row]
    mean = saving.mean_tokens_per_second()
    near = [row for row in saving.known_rows() if mean[row] >= (1 - tolerance) * mean.max()]
    assert saving.memory.required_C[chosen.row] == min(saving.memory.required_C[near])
    assert found.micro_batch_size == size
    assert saving.search_confidence == speed.search_confidence == fastest.confidence


def test_what_may_be_smaller_is_measured_before_the_answer_if_memory_is_preferred() -> None:
    choice: dict[str, Any] = {
        "tolerance": 0.2,
        "recompute": ["none"],
        "model": {**MODEL, "seq_length": 4096},  # long enough for a size of 2 to be near a size of 4
    }
    state = state_of(1, 4, prefer="memory", **choice)
    promising = promising_row(state)
    assert promising is not None
    assert state.table.candidates[promising].micro_batch_size == 2
    suggestion = next_comparison(state, REPORT, 0.0)
    assert suggestion is not None
    assert (suggestion.row, suggestion.components) == (promising, state.wanted(promising))
    assert promising_row(state_of(1, 4, **choice)) is None


def test_a_batch_with_few_divisors_shows_what_another_size_would_reach() -> None:
    req = request(batch_size=7, micro_batch_size=None, bta={"enable": False}, recompute=["none"])
    best = best_of(run(req, SimulatedDevice(req)))
    assert best.candidate.micro_batch_size in (1, 7), "only what divides the batch is recommended"
    undivided = other_of(best, Role.UNDIVIDED)
    assert undivided.candidate.micro_batch_size in (2, 3, 4, 6)
    free = request(micro_batch_size=[2, 3, 4, 6], batch_size=7, bta={"enable": False}, recompute=["none"])
    other = best_of(run(free, SimulatedDevice(free)))
    assert undivided.candidate.micro_batch_size == other.candidate.micro_batch_size
    assert undivided.ratio == pytest.approx(best.tokens_per_second / other.tokens_per_second, rel=0.02)
