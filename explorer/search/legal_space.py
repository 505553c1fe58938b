"""The legal space: every candidate that a request admits on a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from bexp.explorer.dimensions.attention import is_flash
from bexp.explorer.dimensions.candidate import CHOICES, FIELDS, Candidate
from bexp.explorer.dimensions.context_parallel import Sharing
from bexp.explorer.dimensions.dimension import Choice, CodePart
from bexp.explorer.dimensions.exclusions import Exclusion, exclusions_after
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.recompute import Recompute, offers_policy, refuse_number
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import find_missing

T = TypeVar("T")
Point = dict[str, Any]
"""Fields of a candidate that are known already."""


@dataclass(frozen=True, slots=True)
class Column:
    """What the next fields of a candidate may be."""

    fields: tuple[str, ...]
    cells: Callable[[Point], Iterable[Point]]
    """Of the fields that are known already."""

    @classmethod
    def of(cls, field: str, values: Iterable[Any]) -> Column:
        """Return a column of values that depend on no other field."""
        cells = [{field: value} for value in values]
        return cls((field,), lambda known: cells)


class EmptySpaceError(ValueError):
    """The request admits no candidate on this device; the message says which dimension is empty and why."""


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
    where = model.place
    attention = usable_attention(request, report, where)
    experts: list[str] | list[None] = [None]
    if model.has_experts:
        experts = usable_backends("expert back end", report.expert_backends, request.expert_backends, where)
    elif request.expert_backends is not None:
        raise EmptySpaceError(f"expert_backends are given, and there are no experts {where}")
    space, sharings = request.space, _usable_sharings(request, report, attention)

    def tiled(known: Point) -> Iterable[Point]:
        return ({"bta_tile": tile} for tile in _tiles(request, model, known["micro_batch_size"]))

    def shared(known: Point) -> Iterable[Point]:
        m = known["micro_batch_size"]
        return (
            {
                "context_parallel_size": sharing.size,
                "context_parallel_layout": sharing.layout,
                "attention_backend": name,
            }
            for sharing, name in sharings
            if m in space.micro_batch_sizes_over(sharing.size)
        )

    columns: list[Column] = [
        Column.of("micro_batch_size", space.micro_batch_sizes),
        Column(("bta_tile",), tiled),
        Column.of("recompute", _policies(request, model)),
        Column(("context_parallel_size", "context_parallel_layout", "attention_backend"), shared),
        Column.of("expert_backend", experts),
        Column.of("sharding", space.sharding_choices),
        *(Column.of(choice.fields[0], choice_values(choice, request, report, model)) for choice in CHOICES),
        Column.of("settings", model.settings or (None,)),
    ]
    refused: dict[str, int] = {}
    variant, rules = model.variant._asdict(), exclusions_after([column.fields for column in columns])
    made = _combine(columns, rules, request.plain_execution, {}, refused)
    candidates = [Candidate(**variant, **point) for point in made]
    if not candidates:
        if not any(space.micro_batch_sizes_over(sharing.size) for sharing, _ in sharings):
            raise EmptySpaceError(
                f"no micro_batch_size divides what {max(s.size for s, _ in sharings)} devices get of batch_size "
                f"({request.batch_size}), and this worker's profiler has no more that could share sequences"
            )
        untiled = "no attention tile divides a micro-batch of the space"
        reason = _why_no_policy(request, model) or min(refused, key=refused.__getitem__, default=untiled)
        raise EmptySpaceError(reason)
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
    for cell in columns[0].cells(known):
        point = {**known, **cell}
        runs = point.get("execution") or plain
        reason = next((rule.reason(point, runs) for rule in rules[0] if rule.applies(point, runs)), None)
        if reason is None:
            yield from _combine(columns[1:], rules[1:], plain, point, refused)
        else:
            refused[reason] = len(columns)


def _why_no_policy(request: ExplorationRequest, model: ExploredModel) -> str | None:
    """Return why the code of a model can run none of the policies that a request names; None if that is not so."""
    if not isinstance(model, ModelParts) or request.recompute is None or _policies(request, model):
        return None
    whole = model.unavailable.get("checkpointing")
    reasons = dict.fromkeys(filter(None, (model.unavailable.get(policy) or whole for policy in request.recompute)))
    policies = ", ".join(f"'{policy}'" for policy in request.recompute)
    return f"recompute {policies}: {'; '.join(reasons) or f'none of them can be run {model.place}'}"


def expressible(
    points: Sequence[T],
    candidate_of: Callable[[T], Candidate],
    request: ExplorationRequest,
    report: DeviceReport,
) -> tuple[T, ...]:
    """Return the points whose candidates the request's trainer can be told; all of them if it names none.

    Raises:
        EmptySpaceError: there is none.
    """
    if request.trainer is None:
        return tuple(points)
    kept = tuple(p for p in points if not find_missing(request.runner, candidate_of(p), request, report))
    if points and not kept:
        missing = find_missing(request.runner, candidate_of(points[0]), request, report)
        raise EmptySpaceError(f"{request.runner.title} cannot express {' or '.join(missing.values())}")
    return kept


def base_candidates(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> tuple[Candidate, ...]:
    """Return the candidates for the base (1.00x) in order of preference; the first that fits is the base.

    They have the smallest legal micro-batch, or the one that the request names, and the default expert back end. They
    are untiled. The first recomputes nothing; selective and full recomputation follow, then `offload` if it is asked
    for. The same follow with the next number of devices a sequence, from the fewest that the request allows, in the
    plainest layout. All of them follow with the next level of sharding that may be chosen. Attention is torch's
    default, or the first back end that serves shared sequences if the default does not. If the request excludes flash
    attention, and the default is that, it is the first back end that is not.
    """
    policies: tuple[Recompute, ...] = (Recompute.NONE,)
    if request.mode == "train":
        asked = {Recompute.OFFLOAD}.intersection(request.space.recompute_policies)
        policies = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL, *asked)
    policies = tuple(policy for policy in policies if offers_policy(model, policy, named=True))
    usable = [b.name for b in report.attention_backends if b.usable]
    attention = [report.default_attention, *usable]
    if not request.flash_attention:
        attention = [name for name in attention if name in usable and not is_flash(name)]
    plainest: dict[int, tuple[Sharing, str]] = {}
    for sharing, backend in _sharings_with(request, report, attention):
        plainest.setdefault(sharing.size, (sharing, backend))
    first = {choice.fields[0]: choice_values(choice, request, report, model)[0] for choice in CHOICES}
    bases = tuple(
        Candidate(
            micro_batch_size=request.base_micro_batch_size or min(request.space.micro_batch_sizes_over(sharing.size)),
            recompute=recompute,
            attention_backend=backend,
            expert_backend=report.default_experts if model.has_experts else None,
            **model.variant._asdict(),
            context_parallel_size=sharing.size,
            context_parallel_layout=sharing.layout,
            sharding=sharding,
            **first,
            settings=next(iter(model.settings), None),
        )
        for sharding in request.space.sharding_choices
        for sharing, backend in plainest.values()
        if request.base_micro_batch_size or request.space.micro_batch_sizes_over(sharing.size)
        for recompute in policies
    )
    if request.trainer is None:
        return bases
    return tuple(base for base in bases if not find_missing(request.runner, base, request, report)) or bases[:1]


def _tiles(request: ExplorationRequest, model: ExploredModel, micro_batch_size: int) -> tuple[int | None, ...]:
    """Return the tiles to try."""
    tiles = request.space.tiles_for(micro_batch_size)
    return tuple(tile for tile in tiles if tile is None or model.offers_tiles(named=request.bta.is_named))


def _policies(request: ExplorationRequest, model: ExploredModel) -> tuple[Recompute, ...]:
    """Return the policies to try."""
    policies = request.space.recompute_policies
    for policy in policies:
        try:
            refuse_number(policy, model.num_layers)
        except ValueError as error:
            raise EmptySpaceError(str(error)) from error
    return tuple(policy for policy in policies if offers_policy(model, policy, named=request.recompute is not None))


def choice_values(
    choice: Choice[Any], request: ExplorationRequest, report: DeviceReport, model: ExploredModel
) -> tuple[Any, ...]:
    """Return what candidates may have of a choice, the base's first; None alone where there is nothing to choose.

    Where the request names no value, only what the device has reported is explored.

    Raises:
        EmptySpaceError: the device can have none of the values.
    """
    if choice.part is CodePart.SHELL and not model.computes_losses:
        return (None,)
    considered = request.space_on(report.hardware.device_kind).values_of(choice)
    supports, named = report.choices.get(choice.name, ()), choice.named(request)
    is_unheard_of = choice.settings is None or any(choice.is_tried(value) for value in named or ())
    if not supports and is_unheard_of and named not in (None, (choice.plain,)):
        raise EmptySpaceError(f"{choice.name} {' or '.join(map(repr, map(str, named)))} cannot be set {model.place}")
    if supports:
        reported = {support.name for support in supports}
        asked = considered if named is not None else tuple(value for value in considered if value in reported)
        usable = usable_backends(choice.name, supports, asked, model.place)
        left = tuple(value for value in considered if value in usable)
    else:
        left = considered if named is not None else considered[:1]
    return choice.written(request, left)


def _sharings_with(
    request: ExplorationRequest, report: DeviceReport, attention: list[str]
) -> list[tuple[Sharing, str]]:
    """Return the ways to share sequences that the profiler has devices for, each with a back end that serves it."""
    serving = {b.name for b in report.attention_backends if b.usable and b.context_parallel}
    return [
        (sharing, name)
        for sharing in request.space.sharings
        if sharing.size <= report.hardware.num_devices
        for name in attention
        if sharing.size == 1 or name in serving
    ]


def _usable_sharings(
    request: ExplorationRequest, report: DeviceReport, attention: list[str]
) -> list[tuple[Sharing, str]]:
    sharings = _sharings_with(request, report, attention)
    if sharings:
        return sharings
    size, num_devices = min(request.devices.context_parallel_sizes), report.hardware.num_devices
    if size > num_devices:
        raise EmptySpaceError(
            f"sequences shared by {size} devices need as many; this worker's profiler has {num_devices}"
        )
    asked = [b for b in report.attention_backends if b.name in attention]
    reasons = "; ".join(f"{b.name}: {b.context_parallel_reason or 'it does not say why'}" for b in asked)
    raise EmptySpaceError(f"no attention back end serves context parallelism on this device ({reasons})")


def usable_attention(request: ExplorationRequest, report: DeviceReport, where: str) -> list[str]:
    """Return the attention back ends that the request admits and the device can use.

    Raises:
        EmptySpaceError: none is left.
    """
    names = usable_backends("attention back end", report.attention_backends, request.attention_backends, where)
    found = [name for name in names if request.flash_attention or not is_flash(name)]
    if not found:
        raise EmptySpaceError("no attention back end is left on this device once flash is excluded")
    return found


def usable_backends(
    what: str, supported: tuple[BackendSupport, ...], allowed: tuple[str, ...] | None, where: str
) -> list[str]:
    """Return the usable ones of the kernels that the request names, or of all that are not for such a request alone.

    Raises:
        EmptySpaceError: none is left.
    """
    usable = [backend.name for backend in supported if backend.usable]
    if allowed is None:
        names = [backend.name for backend in supported if backend.usable and not backend.only_when_named]
    else:
        known = {backend.name: backend for backend in supported}
        for name in allowed:
            if name not in known:
                there = ", ".join(sorted(known)) or "none"
                raise EmptySpaceError(f"unknown {what} '{name}'; {where} there is {there}")
        names = [name for name in usable if name in allowed]
    if not names:
        asked = [b for b in supported if not b.usable and (allowed is None or b.name in allowed)]
        reasons = "; ".join(f"{b.name}: {b.reason}" for b in asked)
        raise EmptySpaceError(f"no usable {what} {where} ({reasons})")
    return names
