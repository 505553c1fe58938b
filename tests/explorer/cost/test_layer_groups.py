from __future__ import annotations

from bexp.explorer.cost.decomposition import EqualLayers, group_chunks, group_layers


def test_layers_are_counted_by_sort_with_those_that_lie_below() -> None:
    found = group_layers("babba", [False] * 5)
    assert found == (EqualLayers("a", False, 2, (1, 3), 2, (0, 0)), EqualLayers("b", False, 3, (1, 2), 3, (0, 0)))
    assert [(one.recomputed, one.below) for one in group_layers("aaa", [True, True, False])] == [
        (False, (0, 2)),
        (True, (0, 1)),
    ]


def test_a_chunk_keeps_one_output_and_runs_again_with_all_that_is_inside() -> None:
    whole, rest = sorted(group_chunks("aaaaaaaa", 3), key=lambda one: -one.count)
    assert (whole.count, whole.kept, sum(whole.below), sum(whole.together)) == (6, 2, 1, 2)
    assert (rest.count, rest.kept, sum(rest.below), sum(rest.together)) == (2, 1, 2, 1)
