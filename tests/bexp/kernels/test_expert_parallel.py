from __future__ import annotations

from typing import Any

import pytest

from tests.bexp.kernels import expert_parallel_ranks as ranks

pytestmark = pytest.mark.slow(together="forked")

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What four processes found out together."""
    return ranks.launch(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", ranks.cases(), ids=lambda case: case.name)
def test_output_and_gradients_are_those_of_one_process(found: Found, case: ranks.Case) -> None:
    wanted = set(ranks.NAMES) - ({"x"} if case.frozen else set())
    for rank in found:
        assert set(rank[case.name]) == wanted
        assert max(rank[case.name].values()) <= TOLERANCES[case.dtype]


def test_exchanges_run_beside_computation_in_both_passes(found: Found) -> None:
    forward = [
        *6 * ["rows"],  # tokens, routing weights and routes of both chunks
        *2 * ["broadcast"],
        "own experts",
        "rows",  # the first chunk returns while the second is computed
        "own experts",
        "rows",
        "shadowed experts",
    ]
    backward = [
        *2 * ["rows"],
        "backward of shadowed experts",
        *2 * ["reduce"],
        "backward of own experts",
        *2 * ["rows"],  # gradients of tokens and routing weights of the second chunk
        "backward of own experts",
        *2 * ["rows"],
    ]
    for rank in found:
        assert rank["order"] == forward + backward


def test_a_token_goes_once_to_each_rank_and_comes_back_once(found: Found) -> None:
    for rank in found:
        assert rank["travelled"] == [2 * 5, 2 * 5]


def test_experts_get_from_one_rank_that_plays_all_what_ranks_with_equal_tokens_send(found: Found) -> None:
    for rank in found:
        assert rank["played"] == [[True] * 3] * 2


def test_refusals_give_the_reason(found: Found) -> None:
    for rank in found:
        assert rank["refusals"] == {
            "uneven": "9 experts cannot be spread evenly over 2 ranks",
            "degree": "overlap_degree must be at least 1, not 0",
            "large": "overlap_degree (16384) is too large for 2 ranks",
            "unknown": "shadowed_experts names 8, but the experts are 0 to 7",
            "order": "shadowed_experts must be in increasing order, each of them once",
            "weights": "a rank has 4 of 8 experts, not 8 and 8",
        }


def test_a_rank_that_dies_leaves_nobody_waiting(found: Found) -> None:
    assert all(rank["left alone"] for rank in found[1:])
