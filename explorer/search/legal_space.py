"""The legal space: every candidate that a request admits on a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, TypeVar

from bexp.explorer.dimensions.attention import is_flash
from bexp.explorer.dimensions.candidate import FIELDS, Candidate
from bexp.explorer.dimensions.context_parallel import Sharing
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.experts import WAITING_EXPERTS
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.recompute import Recompute, offers_policy, refuse_number
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import find_missing

Point = TypeVar("Point")


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
    sharings = _usable_sharings(request, report, attention)
    kernels, losses = _kernels(request, report, where), _losses(request, report, model)
    executions = _executions(request, report, where)
    candidates = []
    for m in request.space.micro_batch_sizes:
        at_m = [pair for pair in sharings if m in request.space.micro_batch_sizes_over(pair[0].size)]
        for tile in _tiles(request, model, m):
            for recompute in _policies(request, model, tile):
                code = _code(request, recompute, executions, kernels)
                for (sharing, attention_backend), expert_backend, sharding, loss, (execution, own), settings in product(
                    at_m, experts, request.space.sharding_choices, losses, code, model.settings or (None,)
                ):
                    if expert_backend in WAITING_EXPERTS and (execution or request.plain_execution).replays:
                        continue
                    candidates.append(
                        Candidate(
                            micro_batch_size=m,
                            bta_tile=tile,
                            recompute=recompute,
                            attention_backend=attention_backend,
                            expert_backend=expert_backend,
                            **model.variant._asdict(),
                            context_parallel_size=sharing.size,
                            context_parallel_layout=sharing.layout,
                            sharding=sharding,
                            loss=loss,
                            execution=execution,
                            kernels=own,
                            settings=settings,
                        )
                    )
    if not candidates:
        if not any(request.space.micro_batch_sizes_over(sharing.size) for sharing, _ in sharings):
            raise EmptySpaceError(
                f"no micro_batch_size divides what {max(s.size for s, _ in sharings)} devices get of batch_size "
                f"({request.batch_size}), and this worker's profiler has no more that could share sequences"
            )
        if set(experts) <= WAITING_EXPERTS and all(one.replays for one in request.space.executions):
            raise EmptySpaceError(
                f"execution 'graph' with expert back end '{experts[0]}', which waits for the device to count tokens"
            )
        tiled = "tiling with policies that keep a part of attention only: a tile recomputes attention already"
        raise EmptySpaceError(_why_no_policy(request, model) or tiled)
    return LegalSpace(model, expressible(candidates, lambda candidate: candidate, request, report))


def _why_no_policy(request: ExplorationRequest, model: ExploredModel) -> str | None:
    """Return why the code of a model can run none of the policies that a request names; None if that is not so."""
    if not isinstance(model, ModelParts) or request.recompute is None or _policies(request, model, None):
        return None
    whole = model.unavailable.get("checkpointing")
    reasons = dict.fromkeys(filter(None, (model.unavailable.get(policy) or whole for policy in request.recompute)))
    policies = ", ".join(f"'{policy}'" for policy in request.recompute)
    return f"recompute {policies}: {'; '.join(reasons) or f'none of them can be run {model.place}'}"


def expressible(
    points: Sequence[Point],
    candidate_of: Callable[[Point], Candidate],
    request: ExplorationRequest,
    report: DeviceReport,
) -> tuple[Point, ...]:
    """Return the points whose candidates the request's trainer can be told; all of them if it names none.

    Raises:
        EmptySpaceError: there is none.
    """
    if request.trainer is None:
        return tuple(points)
    kept = tuple(p for p in points if not find_missing(request.runner, candidate_of(p), request, report))
    if points and not kept:
        missing = find_missing(request.runner, candidate_of(points[0]), request, report)
        raise EmptySpaceError(f"{request.runner.title} cannot be told {' or '.join(missing.values())}")
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
            loss=_losses(request, report, model)[0],
            execution=_executions(request, report, model.place)[0],
            kernels=_kernels(request, report, model.place)[0],
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


def _policies(request: ExplorationRequest, model: ExploredModel, tile: int | None) -> tuple[Recompute, ...]:
    """Return the policies to try."""
    policies = request.space.policies_for(tile)
    for policy in policies:
        try:
            refuse_number(policy, model.num_layers)
        except ValueError as error:
            raise EmptySpaceError(str(error)) from error
    return tuple(policy for policy in policies if offers_policy(model, policy, named=request.recompute is not None))


def _losses(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> tuple[str | None, ...]:
    """Return the losses that a model's own code may compute, without those that failed a check.

    Where the request names none, only what the device has reported is explored; likewise executions and kernels. They
    are None for the reference layers, which have one, and for a model that is measured whole.
    """
    if not model.computes_losses:
        return (None,)
    asked = request.space_on(report.hardware.device_kind).losses
    if not report.losses:
        return request.losses or asked[:1]
    usable = usable_backends("loss", report.losses, asked, model.place)
    return tuple(loss for loss in asked if loss in usable)


def _executions(request: ExplorationRequest, report: DeviceReport, where: str) -> tuple[Execution | None, ...]:
    """Return the executions to try, without those that the device or the model's code cannot have.

    Raises:
        EmptySpaceError: none is left.
    """
    space = request.space_on(report.hardware.device_kind)
    choices = space.execution_choices
    if not report.executions:
        return choices if space.names_executions else (None,)
    usable = usable_backends("execution", report.executions, tuple(one.value for one in space.executions), where)
    left = tuple(one for one in choices if one is None or one in usable)
    return left if space.names_executions or len(left) > 1 else (None,)


def _code(
    request: ExplorationRequest,
    recompute: Recompute,
    executions: tuple[Execution | None, ...],
    kernels: tuple[Kernels | None, ...],
) -> list[tuple[Execution | None, Kernels | None]]:
    """Return the executions to try with a policy, each with its kernels.

    In compiled code, the compiler chooses what runs again, and makes kernels of what liger's kernels replace. Compiled
    layers of a model's own code cannot run again as a group. Activations go to the host in eager execution alone.
    """
    return [
        (execution, own)
        for execution in executions
        for own in kernels
        if recompute is not Recompute.OFFLOAD or (execution or request.plain_execution) is Execution.EAGER
        if not (execution or request.plain_execution).compiles
        or (own is not Kernels.LIGER and (execution is None or not (recompute.by_operation or recompute.group_size)))
    ]


def _kernels(request: ExplorationRequest, report: DeviceReport, where: str) -> tuple[Kernels | None, ...]:
    """Return the kernels to try; without a choice, those of the model's own code, under the name None."""
    choices = request.space_on(report.hardware.device_kind).kernel_choices
    if choices == (None,) or (request.kernels is None and not report.kernels):
        return (None,)
    asked = tuple(kernels for kernels in choices if kernels is not None)
    usable = usable_backends("kernels", report.kernels, asked, where)
    left = tuple(kernels for kernels in asked if kernels in usable)
    return left if request.kernels is not None or len(left) > 1 else (None,)


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
