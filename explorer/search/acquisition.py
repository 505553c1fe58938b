"""What to measure next: the highest expected gain a second, by a new candidate or by another run of known ones.

A new candidate's gain is its expected improvement over the incumbent (Mockus, 1978), its cost the seconds of the
components that it wants. Where the device is noisy, the incumbent may be the wrong one among candidates that are all
measured: another run's gain is the tolerance times the probability that a rival beats it by more than that, which is
what keeps the confidence low.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from explorer.cost_model.candidate_table import Floats, Mask, SpaceTable
from explorer.cost_model.components import Component
from explorer.search.candidate_posterior import CandidatePosterior
from explorer.surrogate.gaussian_process import Surrogate

TRIAL_OVERHEAD_SECONDS = 0.15  # of building and warming up a component, before the first trials show it
TIMED_PASSES = 8
NEGLIGIBLE = 0.01  # gains are negligible below this share of the tolerance
MOST_RUNS = 4
"""Of one component: runs of the same minutes share what the machine does meanwhile, so that more tell little."""
RIVALS = 3  # of the incumbent, whose difference from it may be looked at again
TELLING = 0.5  # a component is run again if it contributes at least this share of the largest contribution


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A row of the table and which of its components to measure; `again` if all of them have been measured before."""

    row: int
    components: tuple[Component, ...]
    again: bool = False


@dataclass(frozen=True, slots=True)
class _Offer:
    rate: float
    suggestion: Suggestion


def suggest_measurement(
    posterior: CandidatePosterior,
    table: SpaceTable,
    surrogate: Surrogate,
    tolerance: float,
    count: Callable[[Component], int],
) -> Suggestion | None:
    """The best of both kinds; null when no measurement is expected to change anything.

    `count` tells how often a component was measured.
    """
    if posterior.rows.size == 0:
        return None
    costs_K = measuring_seconds(surrogate.device_mean_K)
    offers = (
        _explore(posterior, table, costs_K, tolerance),
        _repeat(posterior, table, surrogate, costs_K, tolerance, count),
    )
    found = [offer for offer in offers if offer is not None]
    return max(found, key=lambda offer: offer.rate).suggestion if found else None


def split(suggestion: Suggestion, most: int, table: SpaceTable, surrogate: Surrogate) -> tuple[Suggestion, ...]:
    """A suggestion as at most `most` parts that take about as long: the longest component to the shortest part.

    (Graham, 1969.) Parts keep the components' order; a suggestion that is not split stays what it is.
    """
    if most <= 1 or len(suggestion.components) <= 1:
        return (suggestion,)
    columns = [table.column[c] for c in suggestion.components]
    costs = measuring_seconds(surrogate.device_mean_K[columns])
    parts: list[list[int]] = [[] for _ in range(min(most, len(columns)))]
    loads = [0.0] * len(parts)
    for i in np.argsort(-costs, kind="stable"):
        shortest = loads.index(min(loads))
        parts[shortest].append(int(i))
        loads[shortest] += float(costs[i])
    return tuple(
        Suggestion(suggestion.row, tuple(suggestion.components[i] for i in sorted(part)), suggestion.again)
        for part in parts
    )


def measuring_seconds(seconds_K: Floats) -> Floats:
    """What it takes to measure components that take `seconds_K` a pass."""
    return np.asarray(TRIAL_OVERHEAD_SECONDS + TIMED_PASSES * seconds_K)


def _explore(posterior: CandidatePosterior, table: SpaceTable, costs_K: Floats, tolerance: float) -> _Offer | None:
    open_A = posterior.wanted_AP.any(axis=1)
    if not open_A.any():
        return None
    incumbent = posterior.incumbent
    if incumbent is None:
        gain_A = posterior.tokens_NA.mean(axis=0)
        gain_A = gain_A / max(float(gain_A.max()), 1e-9)
    else:
        own_N = posterior.tokens_NA[:, incumbent]
        gain_A = np.maximum(0.0, posterior.tokens_NA - own_N[:, None]).mean(axis=0) / max(float(own_N.mean()), 1e-9)
    gain_A = np.where(open_A, gain_A, 0.0)
    if gain_A.max() < NEGLIGIBLE * tolerance:
        return None
    cost_A = (posterior.wanted_AP * costs_K[table.columns_CP[posterior.rows]]).sum(axis=1)
    rate_A = np.divide(gain_A, cost_A, out=np.zeros_like(gain_A), where=open_A)
    best = int(np.argmax(rate_A))
    row = int(posterior.rows[best])
    return _Offer(float(rate_A[best]), Suggestion(row, _components(table, row, posterior.wanted_AP[best])))


def _repeat(
    posterior: CandidatePosterior,
    table: SpaceTable,
    surrogate: Surrogate,
    costs_K: Floats,
    tolerance: float,
    count: Callable[[Component], int],
) -> _Offer | None:
    incumbent = posterior.incumbent
    if incumbent is None:
        return None
    own_N = posterior.composed_NA[:, incumbent]
    doubt_A = ((1.0 - tolerance) * posterior.composed_NA > own_N[:, None]).mean(axis=0)
    doubt_A = np.where(posterior.clear_A, doubt_A, 0.0)
    best: _Offer | None = None
    for rival in np.argsort(-doubt_A, kind="stable")[:RIVALS]:
        if doubt_A[rival] < NEGLIGIBLE:
            break
        gain = tolerance * float(doubt_A[rival])
        offer = _repeat_pair(posterior, table, surrogate, costs_K, (incumbent, int(rival)), gain, count)
        if offer is not None and (best is None or offer.rate > best.rate):
            best = offer
    return best


def _repeat_pair(
    posterior: CandidatePosterior,
    table: SpaceTable,
    surrogate: Surrogate,
    costs_K: Floats,
    pair: tuple[int, int],
    gain: float,
    count: Callable[[Component], int],
) -> _Offer | None:
    """Another run of what most blurs the difference between two contenders, of whichever of them it belongs to."""
    rows = posterior.rows[list(pair)]
    shares_K = np.zeros((2, len(table.components)))
    shares = table.step_shares(surrogate.device_mean_K, rows)
    for i in range(2):
        np.add.at(shares_K[i], table.columns_CP[rows[i]], shares[i])
    blur_K = np.abs(shares_K[0] - shares_K[1]) * surrogate.log_std_K
    blur = blur_K[table.columns_CP[rows]]
    for i, p in zip(*np.nonzero(blur), strict=True):
        if not 0 < count(table.components[table.columns_CP[rows[i], p]]) < MOST_RUNS:
            blur[i, p] = 0.0
    if blur.max() <= 0.0:
        return None
    telling = blur >= TELLING * blur.max()
    chosen = int(np.argmax((np.where(telling, blur, 0.0) ** 2).sum(axis=1)))
    row, cost = int(rows[chosen]), float(costs_K[table.columns_CP[rows[chosen]][telling[chosen]]].sum())
    return _Offer(gain / cost, Suggestion(row, _components(table, row, telling[chosen]), again=True))


def _components(table: SpaceTable, row: int, chosen_P: Mask) -> tuple[Component, ...]:
    return tuple(table.components[column] for column in table.columns_CP[row][chosen_P])
