"""If nothing fits, the smallest changes to the request after which something would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.required_memory import predict_component_table
from bexp.explorer.cost.step import GIB, memory_limit, required_bytes, static_parts
from bexp.explorer.dimensions.bta_tile import BTASpec
from bexp.explorer.dimensions.micro_batch_size import divisors
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Relaxation, RelaxationKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import EmptySpaceError, LegalSpace, enumerate_candidates
from bexp.explorer.search.smallest_candidate import SmallestCandidate

MAX_DEVICES = 1024
SIZES = tuple(1 << i for i in range(8, -1, -1))
"""Micro-batch sizes to try, the largest first, because it is the smallest change."""
COUNTS = tuple(1 << i for i in range(1, MAX_DEVICES.bit_length()))
"""Numbers of devices to try."""
SHARDINGS = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)


@dataclass(frozen=True, slots=True)
class _Change:
    """Settings of a request that are changed together, and the change in words."""

    words: str
    settings: dict[str, Any]

    def apply(self, request: ExplorationRequest) -> ExplorationRequest | None:
        """Return the changed request; None if the settings contradict the rest of it."""
        try:
            return ExplorationRequest.model_validate({**request.model_dump(), **self.settings})
        except ValueError:
            return None


def find_relaxations(
    request: ExplorationRequest,
    report: DeviceReport,
    model: ExploredModel,
    smallest: SmallestCandidate | None = None,
) -> tuple[Relaxation, ...]:
    """Return every single change after which something is predicted to fit.

    The order is that of preference: a smaller micro-batch, a recomputation policy, an option that the request excludes
    (the chunked loss, tiling, back ends), more of the profiler's devices for each sequence, more devices, a sharding
    level. Only the nearest micro-batch size and the nearest number of devices are named, and every other change that
    helps. If no single change helps, the result is the first combination of changes that does, without the tiles and
    the trainer that the request names if they stand in the way; it may be empty. After a search, predictions count as
    too low by as much as that of its `smallest` candidate was.
    """
    relaxations: list[Relaxation] = []
    factor = 1.0 if smallest is None else _underestimate(request, report, model, smallest)
    for kind, changes, nearest in (
        (RelaxationKind.MICRO_BATCH_SIZE, _smaller(request), True),
        (RelaxationKind.RECOMPUTE, _policies(request), False),
        (RelaxationKind.OPTIONS, _options(request), False),
        (RelaxationKind.CONTEXT_PARALLEL, _sharings(request, report), True),
        (RelaxationKind.NUM_DEVICES, _more_devices(request), True),
        (RelaxationKind.SHARDING, _shardings(request), False),
    ):
        working = _working(kind, changes, request, report, model, factor)
        relaxations += (
            [relaxation for relaxation in [next(working, None)] if relaxation is not None] if nearest else list(working)
        )
    is_divisible = not isinstance(model, ModelParts) or bool(model.layers)  # else its own code trains it on one device
    if not relaxations and is_divisible:
        combined = chain(_together(request), _freed(request))
        relaxations += islice(_working(RelaxationKind.SEVERAL, combined, request, report, model, factor), 1)
    return tuple(relaxations)


def explain_nothing_fits(
    request: ExplorationRequest,
    report: DeviceReport,
    model: ExploredModel,
    remedies: tuple[Relaxation, ...],
    smallest: SmallestCandidate | None = None,
) -> str:
    """Return why no candidate fits, and the first of `remedies` if there are any.

    The peak is that of the `smallest` candidate of a search, else a predicted one.
    """
    limit = memory_limit(request, report.hardware)
    static = min(static_parts(model, request.sharded(level)).total for level in request.space.sharding_choices)
    if smallest is None:
        predicted = smallest_requirement(request, report, model)
        need = f"the smallest candidate is predicted to need {predicted / GIB:.2f} GiB"
    else:
        need = smallest.describe()
    why = f"no candidate fits in {limit / GIB:.2f} GiB: training state alone takes {static / GIB:.2f} GiB, and {need}"
    if not remedies:
        return f"{why}. No micro-batch, recomputation or sharding over {MAX_DEVICES} devices would make it fit"
    first = remedies[0]
    return f"{why}. It would fit with {first.change} (predicted to need {first.required_bytes / GIB:.2f} GiB)"


def smallest_requirement(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> int:
    """Return the bytes that the smallest candidate of a request is predicted to need, with context and margin.

    Raises:
        EmptySpaceError: the request admits no candidate on this device.
    """
    return required_bytes(_smallest_peak(request, report, model), report.hardware, request.allocator)


def _underestimate(
    request: ExplorationRequest, report: DeviceReport, model: ExploredModel, smallest: SmallestCandidate
) -> float:
    """Return how many times too low predicted peaks are; at least what explains that nothing fits."""
    predicted = _smallest_peak(request, report, model)
    beside, needed = (required_bytes(peak, report.hardware, request.allocator) for peak in (0, predicted))
    too_many = memory_limit(request, report.hardware) + 2  # one byte, and another for what is rounded
    reported = smallest.reported_factor * smallest.peak_bytes / predicted
    return max(1.0, (too_many - beside) / (needed - beside), reported)


def _smallest_peak(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> int:
    space = _smallest_space(request, report, model)
    table = Composition(space.candidates, model, request)
    saved, transient = table.activation_bytes(*predict_component_table(table))
    return round(float(np.min(table.static_bytes_C + saved + transient)))


def _smallest_space(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> LegalSpace:
    """Return the candidates of the smallest micro-batch that has any, because larger ones need at least as much."""
    for size in request.space.micro_batch_sizes[:-1]:
        try:
            return enumerate_candidates(request.model_copy(update={"micro_batch_size": size}), report, model)
        except EmptySpaceError:
            continue  # no tile divides it
    return enumerate_candidates(request, report, model)


def _working(
    kind: RelaxationKind,
    changes: Iterable[_Change],
    request: ExplorationRequest,
    report: DeviceReport,
    model: ExploredModel,
    factor: float,
) -> Iterator[Relaxation]:
    """Return those of `changes` after which something is predicted to fit, `factor` times the predicted peak."""
    for change in changes:
        changed = change.apply(request)
        if changed is None:
            continue
        try:
            peak = round(factor * _smallest_peak(changed, report, model))
        except EmptySpaceError:
            continue
        required = required_bytes(peak, report.hardware, changed.allocator)
        if required <= memory_limit(changed, report.hardware):
            yield Relaxation(
                kind=kind,
                change=change.words,
                settings={name: _plain(value) for name, value in change.settings.items()},
                predicted_peak_bytes=peak,
                required_bytes=required,
            )


def _smaller(request: ExplorationRequest) -> Iterator[_Change]:
    smallest = min(request.space.micro_batch_sizes)
    for size in SIZES:
        if size < smallest:
            yield _Change(f"micro_batch_size {size}", {"micro_batch_size": size})


def _policies(request: ExplorationRequest) -> Iterator[_Change]:
    named = request.space.recompute_policies
    if request.mode != "train":
        return
    others: tuple[Recompute, ...] = ()
    if Recompute.FULL not in named:  # of what runs again, nothing keeps less
        others = request.model_copy(update={"recompute": None}).space.recompute_policies
    for policy in (*others, Recompute.OFFLOAD):
        if policy is not Recompute.NONE and policy not in named:
            yield _Change(f"recompute {policy}", {"recompute": (policy,)})


def _options(request: ExplorationRequest) -> Iterator[_Change]:
    if request.training.loss.kind == "full":
        loss = request.training.loss.model_copy(update={"kind": "chunked"})
        yield _Change("the chunked loss", {"training": request.training.model_copy(update={"loss": loss})})
    if request.bta.enable is False:
        yield _Change("batch tiling on attention", {"bta": BTASpec()})
    if request.attention_backends is not None:
        yield _Change("every attention back end", {"attention_backends": None})
    if not request.flash_attention:
        yield _Change("flash attention", {"flash_attention": True})


def _sharings(request: ExplorationRequest, report: DeviceReport) -> Iterator[_Change]:
    for size in divisors(request.num_devices):
        if max(request.devices.context_parallel_sizes) < size <= report.hardware.num_devices:
            spec = request.context_parallel.model_copy(update={"sizes": (size,)})
            yield _Change(f"{size} devices a sequence (context_parallel sizes [{size}])", {"context_parallel": spec})


def _more_devices(request: ExplorationRequest) -> Iterator[_Change]:
    """Return larger numbers of devices; they help only if training state is divided over the devices."""
    if request.mode == "train" and request.space.highest_sharding is not Sharding.NONE:
        for count in COUNTS:
            if count > request.num_devices:
                yield _over(request, f"num_devices {count}", count)


def _shardings(request: ExplorationRequest) -> Iterator[_Change]:
    if request.mode == "train" and request.num_devices > 1:
        for sharding in SHARDINGS:
            if sharding.level > request.space.highest_sharding.level:
                yield _over(request, f"sharding {sharding}", request.num_devices, sharding)


def _together(request: ExplorationRequest) -> Iterator[_Change]:
    """Return combinations: the least memory that the present devices allow, then more devices.

    A number of devices is tried without other changes before it is tried with them.
    """
    if request.mode != "train":
        return
    least: dict[str, Any] = {"micro_batch_size": 1, "recompute": (Recompute.FULL,)}
    words = "micro_batch_size 1, recompute full"
    yield _Change("micro_batch_size 1 and recompute full", least)
    if request.num_devices > 1:
        over = _over(request, "", request.num_devices, Sharding.ZERO3)
        yield _Change(f"{words} and sharding zero3 over {request.num_devices} devices", {**least, **over.settings})
    more = [count for count in COUNTS if count > request.num_devices]
    for count in more:
        yield _over(request, f"sharding zero3 over {count} devices", count, Sharding.ZERO3)
    for count in more:
        over = _over(request, "", count, Sharding.ZERO3)
        yield _Change(f"{words} and sharding zero3 over {count} devices", {**least, **over.settings})


def _freed(request: ExplorationRequest) -> Iterator[_Change]:
    """Yield combinations that the named tiles or the trainer may forbid, without the one, the other, and both."""
    tiles = _Change("other tiles", {"bta": request.bta.model_copy(update={"tiles": None})})
    trainer = _Change(f"bexp.apply in place of trainer {request.trainer}", {"trainer": None})
    named = [c for c, value in ((tiles, request.bta.tiles), (trainer, request.trainer)) if value is not None]
    if len(named) > 1:
        named.append(_Change(f"{tiles.words}, {trainer.words}", {**tiles.settings, **trainer.settings}))
    for change in named:
        yield change
        freed = change.apply(request)
        for other in () if freed is None else _together(freed):
            yield _Change(f"{change.words}, {other.words}", {**change.settings, **other.settings})


def _over(request: ExplorationRequest, words: str, num_devices: int, sharding: Sharding | None = None) -> _Change:
    """Return the change to so many devices with the same batch for each, and to a level of sharding if one is named."""
    settings: dict[str, Any] = {"num_devices": num_devices}
    if request.batch_size is not None:
        settings["batch_size"] = max(1, request.batch_size // request.num_devices) * num_devices
    if sharding is not None:
        changed = request.sharded(sharding)
        settings |= {"training": changed.training, "sharding_levels": changed.sharding_levels}
    return _Change(words, {name: value for name, value in settings.items() if getattr(request, name) != value})


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def explain_without_fit(
    request: ExplorationRequest, report: DeviceReport, model: ExploredModel, smallest: SmallestCandidate | None = None
) -> tuple[str, tuple[Relaxation, ...]]:
    """Return that no candidate fits, and the changes that would make one fit."""
    relaxations = find_relaxations(request, report, model, smallest)
    return explain_nothing_fits(request, report, model, relaxations, smallest), relaxations
