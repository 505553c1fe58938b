"""What tiling gained or cost, for a request that allows nothing but tiles."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.answers.alternatives import describe_tiling
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Recommendation, Role
from bexp.explorer.records.trial import Trial, TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.alternatives import best_untiled
from bexp.explorer.search.explore import explore
from bexp.explorer.search.loop import MOST_COMPARISONS
from bexp.explorer.search.whole_models import next_comparison
from tests.explorer.alternatives import other_of
from tests.explorer.explorations import answer_of
from tests.explorer.notes import notes_of
from tests.explorer.search.small import REPORT, candidate, know, small_request, small_state
from tests.explorer.simulator import SimulatedDevice, report

TILES: dict[str, Any] = {"bta": {"enable": True}}
NOTE = "no candidate without tiling fits, so nothing shows what tiling gains or costs"


class WithoutUntiled(SimulatedDevice):
    """A device on which untiled attention runs out of memory."""

    def __call__(self, task: TrialTask) -> Measurement:
        if task.candidate.bta_tile is None:
            return Measurement(candidate=task.candidate, outcome=Outcome.OUT_OF_MEMORY, reason="too large")
        return super().__call__(task)


def search(request: ExplorationRequest, device: SimulatedDevice | None = None) -> tuple[Recommendation, list[Trial]]:
    steps = list(explore(request, report(memory_gib=40), device or SimulatedDevice(request, noise=0.0)))
    answer = answer_of(steps)
    assert answer.recommendation is not None
    return answer.recommendation, [step.trial for step in steps if step.trial is not None]


def test_the_best_untiled_candidate_is_measured_and_compared_and_never_recommended() -> None:
    found, trials = search(small_request(**TILES))
    assert found.candidate.bta_tile is not None
    untiled = other_of(found, Role.UNTILED)
    assert (untiled.candidate.bta_tile, untiled.predicted) == (None, False)
    assert untiled.candidate.micro_batch_size > 1, "it is not the base"
    assert untiled.ratio == pytest.approx(found.expected_tokens_per_second / untiled.tokens_per_second)
    without = [t for t in trials if t.candidate.bta_tile is None and t.kind is TrialKind.COMPONENTS]
    assert 2 <= len(without) <= 1 + MOST_COMPARISONS, "the base, and what may be the best without tiles"
    assert NOTE not in notes_of(found)
    assert Recommendation.model_validate_json(found.model_dump_json()) == found


def test_the_gain_is_that_over_a_search_without_tiles() -> None:
    tiled, _ = search(small_request(**TILES))
    plain, _ = search(small_request())
    untiled = other_of(tiled, Role.UNTILED)
    assert untiled.composed_tokens_per_second == pytest.approx(plain.composed_tokens_per_second, rel=0.02)
    assert tiled.composed_tokens_per_second < plain.composed_tokens_per_second
    (said,) = describe_tiling(tiled)
    assert "BTA costs " in said.text
    assert (untiled.ratio, tiled.whole_model is None) == (1.0, False), "what was not run whole is not faster"


def test_a_request_that_may_recommend_untiled_attention_names_none_apart() -> None:
    for bta in ({"enable": False}, {"enable": None}):
        found, _ = search(small_request(bta=bta))
        assert found.alternative(Role.UNTILED) is None


def test_a_request_that_names_tiles_beside_untiled_attention_is_told_what_they_gain() -> None:
    named: dict[str, Any] = {"bta": {"tiles": [1]}, "micro_batch_size": [4]}
    state = small_state(**named)
    know(state, *state.table.candidates)
    row = best_untiled(state)
    assert row is not None and state.table.candidates[row].bta_tile is None
    found, _ = search(small_request(**named))
    assert (found.candidate.bta_tile, found.alternative(Role.UNTILED)) == (None, None), "the answer itself is untiled"


def test_if_nothing_untiled_fits_the_answer_says_so() -> None:
    request = small_request(**TILES)
    found, _ = search(request, WithoutUntiled(request, noise=0.0))
    assert found.alternative(Role.UNTILED) is None
    assert NOTE in notes_of(found)


def test_the_comparison_comes_before_whole_models_alone() -> None:
    state = small_state(**TILES)
    know(state, *(c for c in state.table.candidates if c.bta_tile is not None))
    row = best_untiled(state)
    asked = next_comparison(state, REPORT, spent_seconds=1.0)
    assert asked is not None
    assert asked.row == row
    assert next_comparison(state, REPORT, spent_seconds=0.0) is None
    know(state, candidate(4), candidate(4, attention_backend="flash"))
    assert next_comparison(state, REPORT, spent_seconds=1.0) is None
