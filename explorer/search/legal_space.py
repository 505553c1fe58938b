"""The legal space: every candidate that a request admits on a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from bexp.explorer.dimensions.candidate import DIMENSIONS, FIELDS, NESTED, Candidate
from bexp.explorer.dimensions.dimension import Column, Point
from bexp.explorer.dimensions.exclusions import Exclusion, exclusions_after
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.request.requested_space import place_of, reported_place
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

    Raises:
        EmptySpaceError: a restriction leaves a dimension empty on this device.
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
    points: Sequence[T],
    candidate_of: Callable[[T], Candidate],
    request: ExplorationRequest,
    report: DeviceReport,
) -> tuple[T, ...]:
    """Return the points whose candidates the request's trainer can express; all of them if it names none.

    Raises:
        EmptySpaceError: there is none.
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
