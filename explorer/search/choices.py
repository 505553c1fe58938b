"""The other choices that an answer offers: the best that divides the batch, and the smallest peaks near the fastest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bexp.explorer.records.recommendation import DividingCandidate, MemoryChoice
from bexp.explorer.records.trial import Trial
from bexp.explorer.search.batch_division import accumulate, nearest_batch_sizes, recommend_dividing
from bexp.explorer.search.candidate_posterior import confidence_score
from bexp.explorer.search.preference import smallest_position
from bexp.explorer.search.search_state import SearchState
from bexp.explorer.search.whole_model_check import check_whole_model, expected_tokens_per_second
from bexp.explorer.spec.candidate import Candidate

MEMORY_LOSSES = (0.01, 0.03)
"""Shares of the fastest candidate's tokens/s for which the answer says how much memory can be saved."""


def find_dividing(
    state: SearchState, recommended: int, whole_model_of: Callable[[Candidate], Trial | None]
) -> DividingCandidate | None:
    """Return the best candidate that divides the batch, beside the `recommended` row; null if none that fits does."""
    best = recommend_dividing(state)
    if best is None:
        return None
    row = best.row
    candidate, bytes_ = state.table.candidates[row], state.bytes(row)
    steps, _ = accumulate(state.request, candidate)
    assert steps is not None, "it divides the batch"
    own, tokens_per_second = (expected_tokens_per_second(state, each, recommended) for each in (recommended, row))
    check = check_whole_model(state, row, whole_model_of(candidate))
    return DividingCandidate(
        candidate=candidate,
        grad_accum_steps=steps,
        tokens_per_second=tokens_per_second,
        loss=1.0 - tokens_per_second / own,
        confidence=confidence_score(best.confidence),
        predicted=not state.is_known(row),
        step_seconds=state.request.device_batch_size * state.table.model.seq_length / tokens_per_second,
        peak_bytes=bytes_.peak,
        required_bytes=bytes_.required,
        whole_model=check,
        composed_tokens_per_second=state.seconds(row).tokens_per_second,
    )


def dividing_batch_sizes(state: SearchState) -> tuple[int, ...]:
    """Return the nearest batch sizes that a candidate which fits divides; none in eval mode, which has no batch."""
    if state.request.mode == "eval":
        return ()
    rows = [row for row in state.open_rows() if state.fits(row)]
    return nearest_batch_sizes(state.request, (state.table.candidates[row] for row in rows))


def promising_row(state: SearchState) -> int | None:
    """Return the row that would be recommended for its small peak if all that is predicted of it holds.

    Null if the request prefers speed, or if there is nothing to recommend yet.
    """
    posterior, request = state.posterior, state.request
    if posterior.incumbent is None or request.prefer == "speed":
        return None
    eligible = np.flatnonzero(posterior.clear_A | state.memory.surely_fits(posterior.rows))
    best = smallest_position(posterior, eligible, posterior.incumbent, state.memory.required_C, request.tolerance)
    return int(posterior.rows[best])


def memory_choices(state: SearchState, recommended: int) -> tuple[MemoryChoice, ...]:
    """Return the fastest candidate and the smallest peaks near it; the fastest need not be the `recommended` row.

    A whole model's run can say that a candidate is slower than the search expects; then it is not near. Other figures
    are scaled as in the rest of the answer, by the whole model of the recommended candidate.
    """
    posterior = state.posterior
    if posterior.incumbent is None:
        return ()
    clear, fastest = np.flatnonzero(posterior.clear_A), int(posterior.rows[posterior.incumbent])
    most = expected_tokens_per_second(state, fastest, recommended)
    reached = np.array([expected_tokens_per_second(state, int(posterior.rows[i]), recommended) for i in clear])
    choices = []
    for within in (0.0, *MEMORY_LOSSES):
        near = clear[reached >= (1.0 - within) * most]
        chosen = smallest_position(posterior, near, posterior.incumbent, state.memory.required_C, within)
        row = int(posterior.rows[chosen])
        tokens_per_second = expected_tokens_per_second(state, row, recommended)
        choices.append(
            MemoryChoice(
                within=within,
                candidate=state.table.candidates[row],
                tokens_per_second=tokens_per_second,
                loss=1.0 - tokens_per_second / most,
                peak_bytes=state.bytes(row).peak,
                required_bytes=state.bytes(row).required,
            )
        )
    return tuple(choices)
