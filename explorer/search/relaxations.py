"""If nothing fits: the smallest candidate, and the smallest changes to the request after which something would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from math import lcm
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bexp.explorer.cost.composition import Composition, predict_component_table
from bexp.explorer.cost.peak_memory import PeakMemory, peak_memory
from bexp.explorer.cost.step import GIB, memory_limit, required_bytes, static_parts
from bexp.explorer.dimensions.candidate import DIMENSIONS, Candidate
from bexp.explorer.dimensions.dimension import Change
from bexp.explorer.dimensions.place import EmptySpaceError, ReportedPlace
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import Relaxation, RelaxationKind
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest, reported_place
from bexp.explorer.search.legal_space import LegalSpace, enumerate_candidates
from bexp.explorer.search.posterior import Posterior
from bexp.explorer.search.reported_runs import peak_factor


@dataclass(frozen=True, slots=True)
class SmallestCandidate:
    """The candidate that needs least memory, as its components compose its peak."""

    candidate: Candidate
    peak_bytes: int
    required_bytes: int
    is_measured: bool = True
    """Whether all of its components are measured."""
    ran_out_of_memory: str | None = None
    """The part that was tried and did not fit: its whole model, or a component. None if neither was."""
    reported_factor: float = 1.0
    """At least how many times the composed memory real runs of the model have needed; 1 without any."""
    memory: PeakMemory | None = None
    """What fills its memory at the peak; None if only the bytes are known."""

    def describe(self, limit_bytes: int) -> str:
        """Return the bytes that the candidate needs, and the evidence that it does not fit in `limit_bytes`."""
        seems_to_fit = ", less than the limit" if self.required_bytes <= limit_bytes else ""
        tried = f"{seems_to_fit}, and {self.ran_out_of_memory} ran out of memory" if self.ran_out_of_memory else ""
        if self.reported_factor > 1.0:
            tried += f", and real runs needed at least {self.reported_factor:.2f}x the composed memory"
        peak = "a peak" if self.is_measured else "an expected peak"
        return (
            f"the smallest candidate ({self.candidate.describe()}) has {peak} of {self.peak_bytes / GIB:.2f} GiB and "
            f"needs {self.required_bytes / GIB:.2f} GiB with fragmentation, context and margin{tried}"
        )


def find_smallest(posterior: Posterior, whole_models: Iterable[Trial], *, memory_failed: bool) -> SmallestCandidate:
    """Return the candidate with the smallest peak; of several, one whose whole model ran out of memory.

    `memory_failed` says that trials of components failed, all of them because memory was short.
    """
    table, smallest = posterior.table, posterior.smallest_row
    ran_out = (t for t in whole_models if t.measurement.outcome is Outcome.OUT_OF_MEMORY)
    rows = [table.row[t.candidate] for t in ran_out if t.candidate in table.row]
    alike = [row for row in rows if posterior.memory.required_C[row] <= posterior.memory.required_C[smallest]]
    row, failed = (alike[0], "its whole model") if alike else (smallest, None)
    is_measured, memory = posterior.is_known(row), posterior.bytes(row)
    if failed is None and posterior.fits(row) and not (is_measured or posterior.is_open(row)) and memory_failed:
        failed = "a component of it"
    factor = peak_factor(posterior.knowledge.reported)
    filled = posterior.peak_memory(row)
    return SmallestCandidate(
        table.candidates[row], memory.peak, memory.required, is_measured, failed, reported_factor=factor, memory=filled
    )


MAX_DEVICES = 1024
COUNTS = tuple(1 << i for i in range(1, MAX_DEVICES.bit_length()))
"""Numbers of devices to try."""
NEAREST = frozenset({RelaxationKind.MICRO_BATCH_SIZE, RelaxationKind.CONTEXT_PARALLEL, RelaxationKind.NUM_DEVICES})
"""Of these only the first change that helps is named."""


def find_relaxations(
    request: ExplorationRequest, report: DeviceReport, model: ExploredModel, smallest: SmallestCandidate | None = None
) -> tuple[Relaxation, ...]:
    """Return every single change after which something is predicted to fit, in order of preference.

    The order is: a smaller micro-batch, a recomputation policy, an option that the request excludes (the chunked loss,
    tiling, back ends), more of the profiler's devices for each sequence, more devices, a sharding level. Of micro-batch
    sizes and numbers of devices only the nearest is returned, of all else every change that helps. If one part is
    most of the smallest candidate's memory, only changes that make it smaller are returned, if any does.

    If no single change helps, the result is the first combination that does; it may be empty. Combinations leave out
    the tiles and the trainer that the request names if they stand in the way. After a search, predictions count as too
    low by as much as that of its `smallest` candidate was.
    """
    found: list[_Working] = []
    least = _least_memory(request, report, model)
    errors = _errors(request, report, least, smallest)
    changes = single_changes(request, reported_place(request, report, model))
    for kind in RelaxationKind:
        working = _working(kind, changes.get(kind, ()), request, report, model, errors)
        found += islice(working, 1 if kind in NEAREST else None)
    is_divisible = not isinstance(model, ModelParts) or bool(model.layers)  # else its own code trains it on one device
    if not found and is_divisible:
        combined = chain(_together(request), _freed(request))
        found += islice(_working(RelaxationKind.SEVERAL, combined, request, report, model, errors), 1)
    filled = _memory_of(least, smallest)
    before = least.memory.parts.get(filled.largest, filled.parts[filled.largest])
    shrinking = [one for one in found if one.memory.parts.get(filled.largest, 0) < before]
    return tuple(one.relaxation for one in (filled.is_wall and shrinking) or found)


def explain_without_fit(
    request: ExplorationRequest, report: DeviceReport, model: ExploredModel, smallest: SmallestCandidate | None = None
) -> tuple[str, tuple[Relaxation, ...]]:
    """Return why no candidate fits, with the preferred change that would make one fit, and all such changes.

    The peak is that of the `smallest` candidate of a search, else a predicted one.
    """
    remedies = find_relaxations(request, report, model, smallest)
    limit = memory_limit(request, report.hardware)
    static = min(static_parts(model, request.sharded(level)).total for level in request.space.sharding_choices)
    least = _least_memory(request, report, model)
    if smallest is None:
        predicted = required_bytes(least.peak, report.hardware, request.allocator)
        need = f"the smallest candidate is predicted to need {predicted / GIB:.2f} GiB"
    else:
        need = smallest.describe(limit)
    most = report.hardware.memory_limit_bytes
    is_lower = request.memory_limit_gib is not None and limit < most
    whose = f" (memory_limit_gib; the device has {most / GIB:.2f} GiB)" if is_lower else ""
    why = (
        f"no candidate fits in {limit / GIB:.2f} GiB{whose}: training state alone takes {static / GIB:.2f} GiB, the "
        f"largest part of the peak is {_memory_of(least, smallest).describe()}, and {need}"
    )
    way = f"No micro-batch, recomputation or sharding over {MAX_DEVICES} devices would make it fit"
    if remedies:
        first = remedies[0]
        way = f"It would fit with {first.change} (predicted to need {first.required_bytes / GIB:.2f} GiB)"
    return f"{why}. {way}", remedies


class _Least(NamedTuple):
    """The predicted memory of the candidate that is predicted to need least."""

    peak: int
    memory: PeakMemory


class _Working(NamedTuple):
    """A change that helps, and the memory of the candidate that needs least after it."""

    relaxation: Relaxation
    memory: PeakMemory


class _Errors(NamedTuple):
    """The factors by which predicted peaks are too low.

    `surely` explains that nothing fits. `measured` is that of the smallest candidate, so that no change is said to need
    more than what did not fit.
    """

    surely: float = 1.0
    measured: float = 1.0


def _errors(
    request: ExplorationRequest, report: DeviceReport, least: _Least, smallest: SmallestCandidate | None
) -> _Errors:
    if smallest is None:
        return _Errors()
    fixed, needed = (required_bytes(peak, report.hardware, request.allocator) for peak in (0, least.peak))
    too_many = memory_limit(request, report.hardware) + 2  # one byte, and another for what is rounded
    measured = smallest.reported_factor * smallest.peak_bytes / least.peak
    return _Errors(max(1.0, (too_many - fixed) / (needed - fixed), measured), measured)


def _memory_of(least: _Least, smallest: SmallestCandidate | None) -> PeakMemory:
    return least.memory if smallest is None or smallest.memory is None else smallest.memory


def _least_memory(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> _Least:
    space = _smallest_space(request, report, model)
    table = Composition(space.candidates, model, request)
    predicted = predict_component_table(table)
    saved, transient = table.activation_bytes(*predicted)
    peak_C = table.static_bytes_C + saved + transient
    row = int(np.argmin(peak_C))
    return _Least(round(float(peak_C[row])), peak_memory(table, row, predicted))


def _smallest_space(request: ExplorationRequest, report: DeviceReport, model: ExploredModel) -> LegalSpace:
    """Return the candidates of the smallest micro-batch that has any, because larger ones need at least as much."""
    for size in request.space.micro_batch_sizes[:-1]:
        try:
            return enumerate_candidates(request.model_copy(update={"micro_batch_size": size}), report, model)
        except EmptySpaceError:
            continue  # no tile divides it
    return enumerate_candidates(request, report, model)


def _changed(request: ExplorationRequest, change: Change) -> ExplorationRequest | None:
    """Return the changed request; None if the settings contradict the rest of it."""
    try:
        return ExplorationRequest.model_validate({**request.model_dump(), **change.settings})
    except ValueError:
        return None


def _working(
    kind: RelaxationKind,
    changes: Iterable[Change],
    request: ExplorationRequest,
    report: DeviceReport,
    model: ExploredModel,
    errors: _Errors,
) -> Iterator[_Working]:
    """Return those of `changes` after which something is predicted to fit even if predictions are too low."""
    for change in changes:
        changed = _changed(request, change)
        if changed is None:
            continue
        try:
            least = _least_memory(changed, report, model)
        except EmptySpaceError:
            continue
        surely, measured = (round(error * least.peak) for error in errors)
        if required_bytes(surely, report.hardware, changed.allocator) <= memory_limit(changed, report.hardware):
            relaxation = Relaxation(
                kind=kind,
                change=change.words,
                settings={name: _plain(value) for name, value in change.settings.items()},
                predicted_peak_bytes=measured,
                required_bytes=required_bytes(measured, report.hardware, changed.allocator),
            )
            yield _Working(relaxation, least.memory)


def single_changes(request: ExplorationRequest, place: ReportedPlace) -> dict[RelaxationKind, Iterable[Change]]:
    """Return the single changes of each kind; those of a dimension without a kind of its own are options."""
    options: list[Change] = []
    changes: dict[RelaxationKind, Iterable[Change]] = {
        RelaxationKind.OPTIONS: options,
        RelaxationKind.NUM_DEVICES: _more_devices(request),
    }
    for dimension in DIMENSIONS:
        if dimension.name in set(RelaxationKind):
            changes[RelaxationKind(dimension.name)] = dimension.relaxations(place)
        else:
            options += dimension.relaxations(place)
    return changes


def _more_devices(request: ExplorationRequest) -> Iterator[Change]:
    """Return larger numbers of devices; they help only if training state is divided over the devices."""
    if request.mode == "train" and request.space.highest_sharding is not Sharding.NONE:
        for count in COUNTS:
            if count > request.num_devices:
                yield _over(request, f"num_devices {count}", count)


def _together(request: ExplorationRequest) -> Iterator[Change]:
    """Return combinations: the least memory that the present devices allow, then more devices.

    A number of devices is tried without other changes before it is tried with them.
    """
    if request.mode != "train":
        return
    parts = [dimension.least for dimension in DIMENSIONS if dimension.least is not None]
    least: dict[str, Any] = {name: value for part in parts for name, value in part.settings.items()}
    words = ", ".join(part.words for part in parts)
    yield Change(" and ".join(part.words for part in parts), least)
    if request.num_devices > 1:
        spread = f"{words} and sharding zero3 over {request.num_devices} devices"
        yield _over(request, spread, request.num_devices, Sharding.ZERO3, least)
    more = [count for count in COUNTS if count > request.num_devices]
    for count in more:
        yield _over(request, f"sharding zero3 over {count} devices", count, Sharding.ZERO3)
    for count in more:
        yield _over(request, f"{words} and sharding zero3 over {count} devices", count, Sharding.ZERO3, least)


def _freed(request: ExplorationRequest) -> Iterator[Change]:
    """Yield combinations that the named values or the trainer may forbid, without each of them, and without all."""
    place = request.space.place
    named = [change for dimension in DIMENSIONS if (change := dimension.freed(place)) is not None]
    if request.trainer is not None:
        named.append(Change(f"bexp.apply in place of trainer {request.trainer}", {"trainer": None}))
    if len(named) > 1:
        settings = {name: value for change in named for name, value in change.settings.items()}
        named.append(Change(", ".join(change.words for change in named), settings))
    for change in named:
        yield change
        freed = _changed(request, change)
        for other in () if freed is None else _together(freed):
            yield Change(f"{change.words}, {other.words}", {**change.settings, **other.settings})


def _over(
    request: ExplorationRequest,
    words: str,
    num_devices: int,
    sharding: Sharding | None = None,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> Change:
    """Return the change to so many devices, with a level of sharding if one is named, and with other changes.

    The batch of a step stays. If these devices cannot have equal shares of it, the words name the nearest one.
    """
    settings: dict[str, Any] = {"num_devices": num_devices}
    if sharding is not None:
        settings |= SHARDING.settings_of(sharding, request.space.place)
    settings = {**others, **{name: value for name, value in settings.items() if getattr(request, name) != value}}
    change = Change(words, settings)
    if request.batch_size is None or _changed(request, change) is not None:
        return change
    batch = nearest_batch(request, num_devices, settings.get("micro_batch_size", request.micro_batch_size))
    return Change(f"{words} and batch_size {batch}", {**settings, "batch_size": batch})


def nearest_batch(request: ExplorationRequest, num_devices: int, micro_batch_size: object) -> int:
    """Return the batch next to that of a request of which so many devices have equal shares, in whole micro-batches."""
    size = micro_batch_size if isinstance(micro_batch_size, int) else 1
    unit = lcm(num_devices * size, request.bta.max_tile or 1)
    return max(1, round(request.effective_batch_size / unit)) * unit


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
