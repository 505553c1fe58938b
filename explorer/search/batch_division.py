"""Which candidates divide the requested batch: what each device gets of it is then a whole number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bexp.explorer.cost_model.candidate_table import Mask, SpaceTable
from bexp.explorer.search.preference import smallest_position
from bexp.explorer.search.search_state import BestCandidate, SearchState
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.request import ExplorationRequest


def accumulate(request: ExplorationRequest, candidate: Candidate) -> tuple[int | None, tuple[int, ...]]:
    """Return the accumulation steps for the requested batch, or the nearest batch sizes that divide.

    In each accumulation step, every group of devices that share sequences processes one micro-batch.
    """
    if request.mode == "eval":
        return None, ()
    unit = _unit(request, candidate)
    if request.batch_size % unit == 0:
        return request.batch_size // unit, ()
    return None, _neighbours(request, [unit])


def nearest_batch_sizes(request: ExplorationRequest, candidates: Iterable[Candidate]) -> tuple[int, ...]:
    """Return the nearest batch sizes, below and above the requested one, that at least one of `candidates` divides."""
    return _neighbours(request, {_unit(request, candidate) for candidate in candidates})


def dividing_rows(table: SpaceTable) -> Mask:
    """Return the candidates that divide the requested batch, shape (C,); none in eval mode, which has no batch."""
    request = table.request
    if request.mode == "eval":
        return np.zeros(len(table.candidates), dtype=np.bool_)
    unit_C = table.micro_batch_C * (request.num_devices // table.sharing_C)
    return np.asarray(request.batch_size % unit_C == 0)


def recommend_dividing(state: SearchState) -> BestCandidate | None:
    """Return the candidate to recommend among those that divide the requested batch; null if none of them fits.

    It is the recommended one if that divides. The search does not aim at the others, so they need not be known well
    enough: the one that is most likely to be within the tolerance of the best of them is taken, except where only a
    measurement tells whether it fits. The confidence is that probability.
    """
    request, recommended, divides_C = state.request, state.recommend(), dividing_rows(state.table)
    if recommended is not None and divides_C[recommended.row]:
        rows = state.posterior.rows
        position = int(np.flatnonzero(rows == recommended.row)[0])
        confidence = state.posterior.confidence(position, request.tolerance, among_A=divides_C[rows])
        return BestCandidate(recommended.row, confidence)
    rows = state.open_rows()
    posterior = state.posterior_of(rows[divides_C[rows]])
    eligible = np.flatnonzero(posterior.clear_A | state.memory.surely_fits(posterior.rows))
    if not eligible.size:
        return None
    confidence_A = posterior.confidences(request.tolerance)
    best = int(max(eligible, key=lambda i: (confidence_A[i], posterior.mean_A[i])))
    if request.prefer == "memory":
        best = smallest_position(posterior, eligible, best, state.memory.required_C, request.tolerance)
    return BestCandidate(int(posterior.rows[best]), float(confidence_A[best]))


def _unit(request: ExplorationRequest, candidate: Candidate) -> int:
    """Sequences that all devices process in one accumulation step."""
    return candidate.micro_batch_size * request.data_parallel_size(candidate.context_parallel_size)


def _neighbours(request: ExplorationRequest, units: Iterable[int]) -> tuple[int, ...]:
    below = max((request.batch_size // unit * unit for unit in units), default=0)
    above = min((-(-request.batch_size // unit) * unit for unit in units), default=0)
    return tuple(size for size in (below, above) if size > 0)
