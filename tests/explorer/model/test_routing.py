from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import ValidationError

from bexp.explorer.model.model import MoESpec
from bexp.explorer.model.routes import draw_routes
from bexp.explorer.model.routing import RoutingSpec

NUM_TOKENS = 20_000
TOLERANCE = 0.006  # on a share: the noise of 20,000 tokens, and what the solver leaves


def mixture(num_experts: int, top_k: int) -> MoESpec:
    return MoESpec(num_experts=num_experts, top_k=top_k, expert_ffn_hidden_size=8)


def draw(num_experts: int, top_k: int, seed: int = 0, num_tokens: int = NUM_TOKENS, **routing: Any) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    return draw_routes(mixture(num_experts, top_k), RoutingSpec(**routing), num_tokens, rng)


def count_shares(routes: npt.NDArray[Any], num_experts: int) -> npt.NDArray[Any]:
    return np.bincount(routes.ravel(), minlength=num_experts) / routes.size


@pytest.mark.parametrize("top_k", [1, 2, 7, 8])
@pytest.mark.parametrize("routing", [{}, {"kind": "zipf"}, {"kind": "shares", "shares": (1.0,) * 8}])
def test_each_token_goes_to_distinct_experts(top_k: int, routing: dict[str, Any]) -> None:
    routes = draw(8, top_k, num_tokens=2000, **routing)
    assert routes.shape == (2000, top_k)
    assert routes.dtype == np.int64
    assert routes.min() >= 0
    assert routes.max() < 8
    ordered = np.sort(routes, axis=1)
    assert (np.diff(ordered, axis=1) > 0).all()


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (8, 2), (64, 8)])
def test_uniform_shares(num_experts: int, top_k: int) -> None:
    shares = count_shares(draw(num_experts, top_k), num_experts)
    assert np.abs(shares - 1 / num_experts).max() < TOLERANCE


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_zipf_shares_of_one_expert_a_token(exponent: float) -> None:
    weights = np.arange(1, 17) ** -exponent
    shares = count_shares(draw(16, 1, kind="zipf", zipf_exponent=exponent), 16)
    assert np.abs(shares - weights / weights.sum()).max() < TOLERANCE


def test_zipf_pairs_follow_successive_sampling() -> None:
    """P(i, then j) = w_i w_j / (1 - w_i), as drawing from a softmax without replacement has it (Plackett-Luce)."""
    weights = 1 / np.arange(1, 5)
    weights /= weights.sum()
    expected = np.zeros(4)
    for first in range(4):
        for second in set(range(4)) - {first}:
            chance = weights[first] * weights[second] / (1 - weights[first])
            expected[[first, second]] += chance / 2
    shares = count_shares(draw(4, 2, kind="zipf"), 4)
    assert np.abs(shares - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("top_k", "shares"),
    [
        (1, (0.9, 0.1, 0.0, 0.0)),
        (2, (0.5, 0.5, 0.0, 0.0)),
        (2, (8.0, 6.0, 4.0, 2.0)),
        (3, (1 / 3, 1 / 3, 1 / 3, 0.0)),
        (3, (0.33, 0.33, 0.2, 0.14)),
        (8, tuple(1 / (i + 3) for i in range(64))),
        (8, (*(0.12,) * 4, *(0.52 / 124,) * 124)),
    ],
    ids=lambda value: f"{len(value)}-experts" if isinstance(value, tuple) else f"top{value}",
)
def test_given_shares_are_the_shares_that_are_drawn(top_k: int, shares: tuple[float, ...]) -> None:
    target = np.array(shares) / sum(shares)
    drawn = count_shares(draw(len(shares), top_k, kind="shares", shares=shares), len(shares))
    assert np.abs(drawn - target).max() < TOLERANCE
    assert (drawn[target == 0] == 0).all()


def test_a_draw_depends_on_its_generator_alone() -> None:
    assert (draw(16, 2, seed=3, num_tokens=100) == draw(16, 2, seed=3, num_tokens=100)).all()
    assert (draw(16, 2, seed=3, num_tokens=100) != draw(16, 2, seed=4, num_tokens=100)).any()


def test_many_experts_are_drawn_in_pieces() -> None:
    routes = draw(1023, 8, num_tokens=9000)
    assert routes.shape == (9000, 8)
    assert np.abs(np.bincount(routes.ravel(), minlength=1023) / 9000 - 8 / 1023).max() < 0.01


@pytest.mark.parametrize(
    ("routing", "part"),
    [
        ({"kind": "shares"}, "exactly when kind is 'shares'"),
        ({"kind": "uniform", "shares": (1.0, 1.0)}, "exactly when kind is 'shares'"),
        ({"kind": "shares", "shares": (0.0, 0.0)}, "must not all be zero"),
        ({"kind": "shares", "shares": (-1.0, 2.0)}, "greater than or equal to 0"),
        ({"kind": "shares", "shares": (float("nan"), 2.0)}, "finite"),
        ({"kind": "zipf", "zipf_exponent": 0}, "greater than 0"),
    ],
)
def test_what_is_no_routing(routing: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RoutingSpec(**routing)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("top_k", "shares", "part"),
    [
        (1, (0.5, 0.5), "routing.shares has 2 entries for 4 experts"),
        (2, (0.6, 0.2, 0.1, 0.1), "a share of 0.6 exceeds 1 / top_k = 0.5"),
        (2, (6.0, 2.0, 1.0, 1.0), "a share of 0.6 exceeds 1 / top_k = 0.5"),
        (4, (0.4, 0.2, 0.2, 0.2), "exceeds 1 / top_k = 0.25"),
    ],
)
def test_shares_that_a_mixture_cannot_have(top_k: int, shares: tuple[float, ...], part: str) -> None:
    with pytest.raises(ValueError, match="share") as caught:
        RoutingSpec(kind="shares", shares=shares).check(mixture(4, top_k))
    assert part in str(caught.value)
