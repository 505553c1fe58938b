"""The legal space: every candidate that a request admits on a device, without what cannot fit or does not pay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from bexp.explorer.cost.collectives import is_communication_timed
from bexp.explorer.cost.composition import Composition, Mask, predict_memory
from bexp.explorer.cost.roofline import predict_component_seconds
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.candidate import DIMENSIONS, FIELDS, NESTED, Candidate
from bexp.explorer.dimensions.dimension import Column, Point
from bexp.explorer.dimensions.exclusions import Exclusion, exclusions_after
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest, place_of, reported_place
from bexp.explorer.search.trainer_terms import find_missing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LegalSpace:
    """The enumeration for one model variant, in ascending order of micro-batch size."""

    model: ExploredModel
    candidates: tuple[Candidate, ...]

    def restrict(self, candidates: Iterable[Candidate]) -> LegalSpace:
        """Return the same model with fewer candidates."""
        return LegalSpace(self.model, tuple(candidates))

    def summarize(self) -> dict[str, Any]:
        """Return the values of each dimension and the number of candidates, as stored with the job."""
        return {
            **{name: value for name, value in self.model.variant._asdict().items() if value is not None},
            "num_candidates": len(self.candidates),
            **dimension_values(self.candidates, FIELDS),
        }


def dimension_values(points: Collection[object], names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the distinct values of each named attribute in order, None first, as JSON has them."""

    def values(name: str) -> list[Any]:
        distinct = {getattr(point, name) for point in points}
        ordered = sorted(distinct, key=lambda value: (value is not None, getattr(value, "rank", value)))
        return [value.value if isinstance(value, Enum) else value for value in ordered]

    return {name: values(name) for name in names}


def explored_models(request: ExplorationRequest, report: DeviceReport) -> tuple[ExploredModel, ...]:
    """Return the model's parts if the target measures its own code, else the variants of the request."""
    return request.space.variants() if report.parts is None else (report.parts,)


def enumerate_candidates(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> LegalSpace:
    """Return all legal candidates of one variant, whether or not they fit the memory.

    A model that a target describes by its parts has only the policies and tiles that its code can run.
    Tiling excludes policies that keep a part of attention, as a tile recomputes it. Eval mode has no recomputation.
    Sequences are shared by no more devices than the profiler has, and only with attention back ends that serve it.

    Raises EmptySpaceError if a restriction leaves a dimension empty on this device.
    """
    place, refused = reported_place(request, report, model), dict[str, int]()
    columns = [dimension.column(place) for dimension in NESTED]
    rules = exclusions_after([dimension.fields for dimension in NESTED])
    made = _combine(columns, rules, request.plain_execution, {}, refused)
    variant = model.variant._asdict()
    candidates = [Candidate(**variant, **point) for point in made]
    if not candidates:
        raise EmptySpaceError(min(refused, key=refused.__getitem__, default="nothing that the request admits is left"))
    return LegalSpace(model, expressible(candidates, lambda candidate: candidate, request, report))


def _combine(
    columns: Sequence[Column],
    rules: Sequence[Sequence[Exclusion]],
    plain: Execution,
    known: Point,
    refused: dict[str, int],
) -> Iterator[Point]:
    """Yield the fields of each candidate that no rule excludes.

    The reasons of the rules are added to `refused`, each with the number of columns that were left: the fewest are left
    where most was legal. `rules` are asked after each column, as soon as the last of their fields is known, so that
    most combinations are never made.
    """
    if not columns:
        yield known
        return
    for cell in columns[0](known):
        point = {**known, **cell}
        runs = point.get("execution") or plain
        reason = next((rule.reason(point, runs) for rule in rules[0] if rule.applies(point, runs)), None)
        if reason is None:
            yield from _combine(columns[1:], rules[1:], plain, point, refused)
        else:
            refused[reason] = len(columns)


def expressible(
    points: Sequence[T], candidate_of: Callable[[T], Candidate], request: ExplorationRequest, report: DeviceReport
) -> tuple[T, ...]:
    """Return the points whose candidates the request's trainer can express; all of them if it names none.

    Raises EmptySpaceError if there is none.
    """
    if request.trainer is None:
        return tuple(points)
    place = place_of(request, report=report)
    kept = tuple(p for p in points if not find_missing(request.runner, candidate_of(p), request, report, place))
    if points and not kept:
        missing = find_missing(request.runner, candidate_of(points[0]), request, report)
        raise EmptySpaceError(f"{request.runner.title} cannot express {' or '.join(missing.values())}")
    return kept


def base_candidates(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> tuple[Candidate, ...]:
    """Return the candidates for the base (1.00x) in order of preference; the first that fits is the base.

    The dimensions that come first in the list vary fastest: recomputation before the number of devices a sequence, and
    that before the level of sharding.
    """
    place, variant = reported_place(request, report, model), model.variant._asdict()
    columns = [dimension.bases(place) for dimension in DIMENSIONS][::-1]
    made = _combine(columns, [()] * len(columns), request.plain_execution, {}, {})
    bases = tuple(Candidate(**variant, **point) for point in made)
    if request.trainer is None:
        return bases
    return tuple(base for base in bases if not find_missing(request.runner, base, request, report)) or bases[:1]


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
    trusted: frozenset[Candidate]
    """The candidates that surely fit, as predicted, because of which those were left out."""
    bases: tuple[Candidate, ...]
    """In order of preference, whether they may fit or not."""
    table: Composition | None
    """A row for each candidate of `legal`, and for each of the `bases` that may fit. None if nothing may fit.

    The request may exclude untiled attention, or state a batch with few divisors. Then the candidates that it so leaves
    out have rows as well, if they may fit: the answer says what they would have gained or cost.
    """


PruneSpace = Callable[[ExploredModel, ExplorationRequest, DeviceReport], PrunedSpace]


def prune_space(
    model: ExploredModel, request: ExplorationRequest, report: DeviceReport, *, is_short: bool = False
) -> PrunedSpace:
    """Enumerate the space of a variant and drop the candidates that are predicted not to fit, or to be dominated.

    None is dominated if memory `is_short`, whatever is predicted.

    Raises EmptySpaceError if the request admits no candidate on this device.
    """
    pruned = _prune(model, request, report, is_short=is_short)
    if pruned.legal.candidates or request.recompute is not None:
        return pruned
    try:
        named = {**request.model_dump(), "recompute": (Recompute.OFFLOAD,)}
        on_host = _prune(model, ExplorationRequest.model_validate(named), report, is_short=is_short)
    except ValueError:  # the target, the trainer, or the number of devices does not have it
        return pruned
    if not on_host.legal.candidates:
        return pruned
    return replace(on_host, num_predicted_out=pruned.num_predicted_out + on_host.num_predicted_out)


@_collector_paused()
def _prune(model: ExploredModel, request: ExplorationRequest, report: DeviceReport, *, is_short: bool) -> PrunedSpace:
    space = enumerate_candidates(request, report, model)
    members = set(space.candidates)
    bases = base_candidates(request, report, model)
    communicates = is_communication_timed(request, report.hardware)
    compared = (*bases, *_compared(request, report, model))
    others = [c for c in dict.fromkeys(compared) if c not in members]
    everything = Composition((*space.candidates, *others), model, request, communicates=communicates)
    limit, number = memory_limit(request, report.hardware), len(space.candidates)
    fits = predict_memory(everything, report.hardware, activation_share=OPTIMISTIC_ACTIVATIONS) <= limit
    dominated, trusted = np.zeros(number, dtype=np.bool_), frozenset[Candidate]()
    if not is_short:
        dominated, trusted = _dominated(everything, number, request, report, limit)
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
    return PrunedSpace(legal, number - int(fits[:number].sum()), num_dominated, trusted, bases, table)


def _dominated(
    table: Composition, number: int, request: ExplorationRequest, report: DeviceReport, limit: int
) -> tuple[Mask, frozenset[Candidate]]:
    """Return which of the first `number` candidates give throughput for memory that the same micro-batch has anyway.

    Return their rivals, too: the candidates that are sure to fit.

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
        return dominated, frozenset()
    rows, others = np.array(rivals).T
    sure = predict_memory(table, report.hardware, activation_share=SURE_ACTIVATIONS) <= limit
    seconds = [predict_component_seconds(c, table.model, request, report.hardware) for c in table.components]
    device, host = np.array([[s.device for s in seconds]]), np.array([s.host for s in seconds])
    micro_step_C = table.micro_step_seconds(device, host)[0]
    loses = sure[others] & (micro_step_C[others] < (1 - LEAST_LOSS) * micro_step_C[rows])
    dominated[rows[loses]] = True
    return dominated, frozenset(table.candidates[row] for row in others[loses])


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
