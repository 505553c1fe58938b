"""The space of one variant before anything is measured, without what is predicted not to fit or not to pay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from bexp.explorer.cost.collectives import is_communication_timed
from bexp.explorer.cost.composition import Composition, Mask
from bexp.explorer.cost.required_memory import predict_memory
from bexp.explorer.cost.roofline import predict_component_seconds
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.candidate import DIMENSIONS, Candidate
from bexp.explorer.dimensions.dimension import Point
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import LegalSpace, base_candidates, enumerate_candidates

OPTIMISTIC_ACTIVATIONS = 0.7
"""A candidate is left out only if it would not fit even with this share of its predicted activations."""

SURE_ACTIVATIONS = 1 / OPTIMISTIC_ACTIVATIONS
"""A candidate surely fits if it would with this many times its predicted activations."""

LEAST_LOSS = 0.04
"""A tile or a policy is dominated if it is predicted to take this share of a micro-step, and its memory is not short.

Of 2,413 pairs in benchmarks/results/tables with such a prediction, none was faster than the same micro-batch without.
"""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Switch the garbage collector off: tens of thousands of candidates are made, and none of them is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class PrunedSpace:
    """The candidates of a variant that may fit and may pay. They depend on neither seed nor budget.

    If nothing may fit, and the request names no policy, the candidates are those with activations in the host's memory,
    where these may fit.
    """

    legal: LegalSpace
    """The candidates that may be recommended."""
    num_predicted_out: int
    """Candidates that are predicted not to fit."""
    num_dominated: int
    """Candidates that recompute or tile to save memory where it is not short."""
    bases: tuple[Candidate, ...]
    """In order of preference, whether they may fit or not."""
    table: Composition | None
    """A row for each candidate of `legal`, and for each of the `bases` that may fit. None if nothing may fit.

    The request may exclude untiled attention, or state a batch with few divisors. Then the candidates that it so leaves
    out have rows as well, if they may fit: the answer says what they would have gained or cost.
    """


PruneSpace = Callable[[ExploredModel, ExplorationRequest, DeviceReport], PrunedSpace]


def prune_space(model: ExploredModel, request: ExplorationRequest, report: DeviceReport) -> PrunedSpace:
    """Enumerate the space of a variant and drop the candidates that are predicted not to fit, or to be dominated.

    Raises:
        EmptySpaceError: the request admits no candidate on this device.
    """
    pruned = _prune(model, request, report)
    if pruned.legal.candidates or request.recompute is not None:
        return pruned
    try:
        named = {**request.model_dump(), "recompute": (Recompute.OFFLOAD,)}
        on_host = _prune(model, ExplorationRequest.model_validate(named), report)
    except ValueError:  # the target, the trainer, or the number of devices does not have it
        return pruned
    if not on_host.legal.candidates:
        return pruned
    return replace(on_host, num_predicted_out=pruned.num_predicted_out + on_host.num_predicted_out)


@_collector_paused()
def _prune(model: ExploredModel, request: ExplorationRequest, report: DeviceReport) -> PrunedSpace:
    space = enumerate_candidates(request, report, model)
    members = set(space.candidates)
    bases = base_candidates(request, report, model)
    communicates = is_communication_timed(request, report.hardware)
    compared = (*bases, *_compared(request, report, model))
    others = [c for c in dict.fromkeys(compared) if c not in members]
    everything = Composition((*space.candidates, *others), model, request, communicates=communicates)
    limit, number = memory_limit(request, report.hardware), len(space.candidates)
    fits = predict_memory(everything, report.hardware, activation_share=OPTIMISTIC_ACTIVATIONS) <= limit
    dominated = _dominated(everything, number, request, report, limit)
    stays = fits[:number] & ~dominated
    legal = space.restrict(compress(space.candidates, stays))
    num_dominated = int((fits[:number] & dominated).sum())
    rows = [*np.flatnonzero(stays), *(row for row in (everything.row[other] for other in compared) if fits[row])]
    rows = list(dict.fromkeys(rows))
    table = None
    if legal.candidates:
        kept = [everything.decompositions[row] for row in rows]
        candidates = [everything.candidates[row] for row in rows]
        table = Composition(candidates, model, request, decompositions=kept)
    return PrunedSpace(legal, number - int(fits[:number].sum()), num_dominated, bases, table)


def _dominated(table: Composition, number: int, request: ExplorationRequest, report: DeviceReport, limit: int) -> Mask:
    """Return which of the first `number` candidates give throughput for memory that the same micro-batch has anyway.

    Tiles and policies that a request names are tried in any case.
    """
    place = request.space.place
    unspent = [point for dimension in DIMENSIONS if (point := dimension.unspent(place))]
    rivals = [
        (row, table.row[rival])
        for row, candidate in enumerate(table.candidates[:number])
        for rival in _rivals(candidate, unspent)
        if table.row.get(rival, number) < number
    ]
    dominated = np.zeros(number, dtype=np.bool_)
    if not rivals:
        return dominated
    rows, others = np.array(rivals).T
    sure = predict_memory(table, report.hardware, activation_share=SURE_ACTIVATIONS) <= limit
    seconds = [predict_component_seconds(c, table.model, request, report.hardware) for c in table.components]
    device, host = np.array([[s.device for s in seconds]]), np.array([s.host for s in seconds])
    micro_step_C = table.micro_step_seconds(device, host)[0]
    dominated[rows[sure[others] & (micro_step_C[others] < (1 - LEAST_LOSS) * micro_step_C[rows])]] = True
    return dominated


def _rivals(candidate: Candidate, unspent: Iterable[Point]) -> Iterator[Candidate]:
    """Yield the candidate without its tile, without its recomputation, and so on."""
    for point in unspent:
        if any(getattr(candidate, name) != value for name, value in point.items()):
            yield candidate.model_copy(update=point)


def _compared(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> Iterator[Candidate]:
    """Yield the candidates that an answer compares with, such as untiled ones; they are never recommended."""
    place = request.space.place
    for dimension in reversed(DIMENSIONS):
        if settings := dimension.compared(place):
            with suppress(EmptySpaceError):  # there is nothing to compare with
                yield from enumerate_candidates(request.model_copy(update=settings), report, model).candidates
