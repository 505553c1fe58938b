"""The other choices that an answer offers: the best that divides the batch, and the smallest peaks near the fastest."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from bexp.explorer.cost.composition import Composition, Ints, Mask
from bexp.explorer.cost.request_texts import tokens_per_sequence
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.recommendation import DividingCandidate, MemoryChoice
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.confidence import confidence_score
from bexp.explorer.search.posterior import BestCandidate, Posterior, smallest_position
from bexp.explorer.search.whole_model_check import (
    check_whole_model,
    expected_peak_bytes,
    expected_tokens_per_second,
)

MEMORY_LOSSES = (0.01, 0.03)
"""Shares of the fastest candidate's tokens/s for which the answer says how much memory can be saved."""


def accumulate(request: ExplorationRequest, candidate: Candidate) -> tuple[int | None, tuple[int, ...]]:
    """Return the micro-batches of a device in the stated batch, or the nearest batch sizes that divide.

    With each, every group of devices that share sequences processes one micro-batch. Both are empty without a batch.
    """
    if request.batch_size is None:
        return None, ()
    unit = _unit(request, candidate)
    if request.batch_size % unit == 0:
        return request.batch_size // unit, ()
    return None, _neighbours(request.batch_size, [unit])


def dividing_rows(table: Composition) -> Mask:
    """Return the candidates that divide the stated batch, shape (C,); none if no batch is stated."""
    request = table.request
    if request.batch_size is None:
        return np.zeros(len(table.candidates), dtype=np.bool_)
    unit_C = table.micro_batch_C * (request.num_devices // table.sharing_C)
    return np.asarray(request.batch_size % unit_C == 0)


def recommend_dividing(posterior: Posterior) -> BestCandidate | None:
    """Return the candidate to recommend among those that divide the stated batch; None if none of them fits.

    It is the recommended one if that divides. The confidence is that among those that divide.
    """
    request, recommended, divides_C = posterior.request, posterior.recommend(), dividing_rows(posterior.table)
    if recommended is not None and divides_C[recommended.row]:
        rows = posterior.contenders.rows
        position = int(np.flatnonzero(rows == recommended.row)[0])
        confidence = posterior.contenders.confidence(position, request.tolerance, among_A=divides_C[rows])
        return BestCandidate(recommended.row, confidence)
    rows = posterior.open_rows()
    return best_among(posterior, rows[divides_C[rows]])


def best_among(posterior: Posterior, rows: Ints) -> BestCandidate | None:
    """Return the one of `rows` with the highest expected throughput, and the confidence among them; None if none fits.

    The search does not aim at these rows, so they need not be known well enough. Left out are those of which only a
    measurement tells whether they fit. If memory is preferred, it is the smallest peak within the tolerance.
    """
    request, contenders = posterior.request, posterior.contenders_among(rows)
    eligible = np.flatnonzero(contenders.clear_A | posterior.memory.surely_fits(contenders.rows))
    if not eligible.size:
        return None
    best = int(eligible[np.argmax((contenders.mean_A * contenders.runs_A)[eligible])])
    if request.prefer == "memory":
        best = smallest_position(contenders, eligible, best, posterior.memory.required_C, request.tolerance)
    return BestCandidate(int(contenders.rows[best]), contenders.confidence(best, request.tolerance))


def find_dividing(
    posterior: Posterior, recommended: int, whole_model_of: Callable[[Candidate], Trial | None]
) -> DividingCandidate | None:
    """Return the best candidate that divides the batch, beside the `recommended` row; None if none that fits does."""
    best = recommend_dividing(posterior)
    if best is None:
        return None
    row = best.row
    candidate, bytes_ = posterior.table.candidates[row], posterior.bytes(row)
    steps, _ = accumulate(posterior.request, candidate)
    assert steps is not None, "it divides the batch"
    own, tokens_per_second = (expected_tokens_per_second(posterior, each, recommended) for each in (recommended, row))
    check = check_whole_model(posterior, row, whole_model_of(candidate))
    return DividingCandidate(
        candidate=candidate,
        grad_accum_steps=steps,
        tokens_per_second=tokens_per_second,
        loss=1.0 - tokens_per_second / own,
        confidence=confidence_score(best.confidence),
        predicted=not posterior.is_known(row),
        step_seconds=posterior.request.devices.batch_share
        * tokens_per_sequence(posterior.table.model, posterior.request)
        / tokens_per_second,
        peak_bytes=bytes_.peak,
        required_bytes=bytes_.required,
        whole_model=check,
        composed_tokens_per_second=posterior.seconds(row).tokens_per_second,
    )


def dividing_batch_sizes(posterior: Posterior) -> tuple[int, ...]:
    """Return the nearest batch sizes that a candidate which fits divides; none if no batch is stated."""
    request = posterior.request
    if request.batch_size is None:
        return ()
    fitting = (posterior.table.candidates[row] for row in posterior.open_rows() if posterior.fits(row))
    return _neighbours(request.batch_size, {_unit(request, candidate) for candidate in fitting})


def promising_row(posterior: Posterior) -> int | None:
    """Return the row that would be recommended for its small peak if all that is predicted of it holds.

    Null if the request prefers speed, or if there is nothing to recommend yet.
    """
    contenders, request = posterior.contenders, posterior.request
    if contenders.incumbent is None or request.prefer == "speed":
        return None
    eligible = np.flatnonzero(contenders.clear_A | posterior.memory.surely_fits(contenders.rows))
    best = smallest_position(contenders, eligible, contenders.incumbent, posterior.memory.required_C, request.tolerance)
    return int(contenders.rows[best])


def memory_choices(posterior: Posterior, recommended: int) -> tuple[MemoryChoice, ...]:
    """Return the fastest candidate and the smallest peaks near it.

    The fastest is the `recommended` row, unless memory is preferred and another is surely faster. A whole model's run
    can say that a candidate is slower than the search expects; then it is not near. Other figures are as in the rest of
    the answer.
    """
    contenders, incumbent = posterior.contenders, posterior.contenders.incumbent
    fastest = posterior.recommended_position
    if fastest is None or incumbent is None:
        return ()
    clear = np.flatnonzero(contenders.clear_A)
    reached = {i: expected_tokens_per_second(posterior, int(contenders.rows[i]), recommended) for i in clear.tolist()}
    if posterior.request.prefer == "memory" and reached[incumbent] > reached[fastest]:
        fastest = incumbent
    choices = []
    for within in (0.0, *MEMORY_LOSSES):
        near = [i for i in reached if reached[i] >= (1.0 - within) * reached[fastest]] if within else [fastest]
        required_C = posterior.memory.required_C
        position = smallest_position(contenders, np.array(near), fastest, required_C, within)
        row = int(contenders.rows[position])
        choices.append(
            MemoryChoice(
                within=within,
                candidate=posterior.table.candidates[row],
                tokens_per_second=reached[position],
                loss=max(0.0, 1.0 - reached[position] / reached[fastest]),
                peak_bytes=expected_peak_bytes(posterior, row),
                required_bytes=posterior.bytes(row).required,
            )
        )
    return tuple(choices)


def _unit(request: ExplorationRequest, candidate: Candidate) -> int:
    """Sequences that all devices process in one accumulation step."""
    return candidate.micro_batch_size * request.devices.data_parallel_size(candidate.context_parallel_size)


def _neighbours(batch_size: int, units: Collection[int]) -> tuple[int, ...]:
    below = max((batch_size // unit * unit for unit in units), default=0)
    above = min((-(-batch_size // unit) * unit for unit in units), default=0)
    return tuple(size for size in (below, above) if size > 0)
