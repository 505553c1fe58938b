"""What tells the variants of a job apart."""

from __future__ import annotations

from bexp.explorer.model.model import Variant
from tests.explorer.search.small import candidate, context, small_request, trial


def test_the_first_variant_is_the_main_one() -> None:
    first = context(small_request())
    assert first.is_main
    assert first.variant == Variant(4)


def test_other_variants_are_told_apart_by_their_query_groups() -> None:
    second = context(small_request(num_query_groups=[4, 2]), index=1)
    assert not second.is_main
    assert second.variant == Variant(2)


def test_a_variant_sees_its_own_trials_in_order() -> None:
    trials = [trial(0), trial(1, candidate(num_query_groups=2)), trial(2, candidate(2))]
    request = small_request(num_query_groups=[4, 2])
    assert [t.number for t in context(request, trials).trials] == [0, 2]
    assert [t.number for t in context(request, trials, index=1).trials] == [1]
