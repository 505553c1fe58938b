from __future__ import annotations

import pytest

from bexp.explorer.cost_model.layer_groups import EqualLayers, group_chunks, group_layers


def test_layers_are_counted_by_sort_with_those_that_lie_below() -> None:
    found = group_layers("babba", [False] * 5)
    assert found == (EqualLayers("a", False, 2, (1, 3), 2, (0, 0)), EqualLayers("b", False, 3, (1, 2), 3, (0, 0)))
    assert [(one.recomputed, one.below) for one in group_layers("aaa", [True, True, False])] == [
        (False, (0, 2)),
        (True, (0, 1)),
    ]


def test_a_chunk_keeps_one_output_and_runs_again_with_all_that_is_inside() -> None:
    whole, rest = sorted(group_chunks("aaaaaaaa", 3), key=lambda one: -one.count)
    assert (whole.count, whole.kept, sum(whole.below), sum(whole.beside)) == (6, 2, 1, 2)
    assert (rest.count, rest.kept, sum(rest.below), sum(rest.beside)) == (2, 1, 2, 1)


@pytest.mark.parametrize(("kinds", "size"), [("abbbb", 2), ("abababab", 4), ("aabbbbaab", 3), ("abc", 3), ("aaaa", 3)])
def test_the_worst_place_of_each_kind_is_among_the_groups(kinds: str, size: int) -> None:
    """Against a walk over every layer: bytes of a kept output 1, of all inside a layer 10 to 12 by kind."""
    inside = {"a": 10, "b": 11, "c": 12}
    walked = dict.fromkeys(kinds, 0)
    for index, kind in enumerate(kinds):
        start = index // size * size
        level = index // size + sum(inside[other] for other in kinds[start:index])
        walked[kind] = max(walked[kind], level)
    groups = group_chunks(kinds, size)
    found = dict.fromkeys(kinds, 0)
    for group in groups:
        level = sum(group.below) + sum(n * inside[o.kind] for n, o in zip(group.beside, groups, strict=True))
        found[group.kind] = max(found[group.kind], level)
    assert found == walked
    assert sum(group.kept for group in groups) == -(-len(kinds) // size)
    assert sum(group.count for group in groups) == len(kinds)
