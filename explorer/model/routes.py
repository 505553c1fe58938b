"""The experts of tokens, drawn for a RoutingSpec; a module of its own, because NumPy takes long to import."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bexp.explorer.model.model import MoESpec
from bexp.explorer.model.routing import RoutingSpec

_MIN_DRAWN_TOKENS = 1 << 12
_MAX_DRAWN_TOKENS = 1 << 16


def draw_batch_routes(moe: MoESpec, routing: RoutingSpec, num_tokens: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the routes of a micro-batch, as `draw_routes` does, for `num_tokens` tokens but at most 65536.

    The routes of fewer tokens are the first of those of more. More than 65536 tokens repeat them: so many settle the
    experts' shares to a few percent, and drawing a token costs the host far more than profiling it costs the device.
    """
    num_drawn = _MIN_DRAWN_TOKENS
    while num_drawn < min(num_tokens, _MAX_DRAWN_TOKENS):
        num_drawn *= 4  # few sizes, so that the micro-batches of a job share what was drawn
    return _draw(moe, routing, num_drawn, seed)[:num_tokens]


@lru_cache(maxsize=8)
def _draw(moe: MoESpec, routing: RoutingSpec, num_tokens: int, seed: int) -> npt.NDArray[np.int64]:
    return draw_routes(moe, routing, num_tokens, np.random.default_rng(seed))


def draw_routes(moe: MoESpec, routing: RoutingSpec, num_tokens: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw top_k distinct experts for each token by Gumbel-top-k (Kool et al., 2019).

    Returns:
        Expert indices of shape (num_tokens, top_k).

    The weights of uniform and Zipf routing are those of successive sampling without replacement, as a softmax router
    draws them. Given shares are inclusion probabilities. The weights are solved for, so that the expected share of the
    pairs is the given share.
    """
    log_weights = _log_weights(moe, routing)
    chunk = max(1, (1 << 22) // moe.num_experts)
    routes = np.empty((num_tokens, moe.top_k), dtype=np.int64)
    for start in range(0, num_tokens, chunk):
        stop = min(num_tokens, start + chunk)
        keys = log_weights + rng.gumbel(size=(stop - start, moe.num_experts))
        if moe.top_k == 1:
            routes[start:stop, 0] = keys.argmax(axis=1)
        else:
            kth = moe.num_experts - moe.top_k
            routes[start:stop] = np.argpartition(keys, kth, axis=1)[:, kth:]
    return routes


def _log_weights(moe: MoESpec, routing: RoutingSpec) -> npt.NDArray[np.float64]:
    if routing.kind == "uniform":
        return np.zeros(moe.num_experts)
    if routing.kind == "zipf":
        ranks = np.arange(1, moe.num_experts + 1, dtype=np.float64)
        log_weights: npt.NDArray[np.float64] = -routing.zipf_exponent * np.log(ranks)
        return log_weights
    shares = np.asarray(routing.shares, dtype=np.float64)
    target = shares / shares.sum() * moe.top_k
    with np.errstate(divide="ignore"):
        log_weights = np.log(target)
    if moe.top_k == 1 or not np.any(target > 0):
        return log_weights
    return _solve_inclusion(np.minimum(target, 1.0), moe.top_k)


def _solve_inclusion(target: npt.NDArray[np.float64], top_k: int) -> npt.NDArray[np.float64]:
    """Return log-weights whose Gumbel-top-k inclusion probabilities are `target`, which sums to top_k.

    Give each expert an exponential clock of rate w. It is among the first top_k if its clock rings before a time tau,
    which hardly varies if there are many experts. So 1 - exp(-w tau) = target gives a start. A fixed-point iteration on
    a fixed set of draws then removes the error of that approximation.
    """
    capped = np.clip(target, 0.0, 1.0 - 1e-6)
    with np.errstate(divide="ignore"):
        log_weights = np.log(-np.log1p(-capped))
    noise = np.random.default_rng(0).gumbel(size=(max(4096, (1 << 21) // target.size), target.size))
    kth = target.size - top_k
    positive = target > 0
    for _ in range(20):
        keys = log_weights + noise
        chosen = np.argpartition(keys, kth, axis=1)[:, kth:]
        inclusion = np.bincount(chosen.ravel(), minlength=target.size) / noise.shape[0]
        if np.all(np.abs(inclusion - target) <= 0.005 * target):
            break
        step = np.log(np.clip(target[positive], 1e-9, None)) - np.log(np.clip(inclusion[positive], 1e-4, None))
        log_weights[positive] += np.clip(step, -1.0, 1.0)
    return log_weights


@lru_cache(maxsize=512)
def dropped_share(moe: MoESpec, routing: RoutingSpec, num_tokens: int, seed: int) -> float:
    """Return the share of the token-expert pairs of `num_tokens` tokens that are over their expert's capacity.

    The routes are those of the measured reference layers. The choice of the dropped pairs depends on their weights, but
    their number does not, so no model is needed here.
    """
    if moe.capacity_factor is None:
        return 0.0
    drawn_TK = _drawn(moe, routing, num_tokens, seed)
    repeats, rest = divmod(num_tokens, drawn_TK.shape[0])
    counts_E = repeats * _count(drawn_TK, moe) + _count(drawn_TK[:rest], moe)
    return 1.0 - float(np.minimum(counts_E, moe.capacity(num_tokens)).sum()) / (num_tokens * moe.top_k)


def _count(routes_TK: npt.NDArray[np.int64], moe: MoESpec) -> npt.NDArray[np.int64]:
    return np.bincount(routes_TK.ravel(), minlength=moe.num_experts)


def _drawn(moe: MoESpec, routing: RoutingSpec, num_tokens: int, seed: int) -> npt.NDArray[np.int64]:
    return draw_batch_routes(moe.model_copy(update={"capacity_factor": None}), routing, num_tokens, seed)
