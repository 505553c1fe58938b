"""If no mesh fits, the smallest changes to the request after which one would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bexp.explorer.cost.step import GIB, memory_limit
from bexp.explorer.dimensions.expert_modes import named_sizes
from bexp.explorer.dimensions.micro_batch_size import divisors
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.meshes.knowledge import POLICIES, MeshKnowledge
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Relaxation, RelaxationKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.relaxations import nearest_batch

MOST_DEVICES = 4096
SIZES = ("tensor", "pipeline", "expert")
Change = tuple[RelaxationKind, str, dict[str, Any]]
"""A change in words, and the fields of the request with their new values."""


def find_mesh_relaxations(request: ExplorationRequest, report: DeviceReport) -> tuple[Relaxation, ...]:
    """Return the single changes after which a mesh is predicted to fit, or the first combination that helps.

    The preferred change comes first. The order is: recomputation, a sharding level, more tensor, pipeline or expert
    parallelism, a smaller micro-batch, more devices. Of each field, the nearest value that helps is returned. The
    result may be empty.
    """
    relaxations: list[Relaxation] = []
    named: set[str] = set()
    for kind, words, settings in _single_changes(request):
        field = words.split()[0]
        if field not in named and (relaxation := _try(request, report, kind, words, settings)) is not None:
            relaxations.append(relaxation)
            named.add(field)
    if relaxations:
        return tuple(relaxations)
    for words, settings in _together(request):
        relaxation = _try(request, report, RelaxationKind.SEVERAL, words, settings)
        if relaxation is not None:
            return (relaxation,)
    return ()


def explain_no_mesh_fits(smallest: int, limit: int, remedies: tuple[Relaxation, ...]) -> str:
    """Return why no mesh fits, and the first of `remedies` if there are any."""
    why = (
        f"no mesh fits: the smallest is predicted to need {smallest / GIB:.2f} GiB of a device, and the limit is "
        f"{limit / GIB:.2f} GiB"
    )
    if not remedies:
        return f"{why}. No tensor, pipeline or expert parallelism over up to {MOST_DEVICES:,} devices would make it fit"
    first = remedies[0]
    return f"{why}. It would fit with {first.change} (predicted to need {first.required_bytes / GIB:.2f} GiB)"


def _try(
    request: ExplorationRequest, report: DeviceReport, kind: RelaxationKind, words: str, settings: dict[str, Any]
) -> Relaxation | None:
    """Return the change if a mesh is predicted to fit after it; None also if it contradicts the rest of the request."""
    try:
        changed = ExplorationRequest.model_validate({**request.model_dump(), **settings})
        smallest = changed.model_copy(update={"micro_batch_size": changed.space.all_micro_batch_sizes[0]})
        space = MeshKnowledge(smallest, report)
    except (ValueError, EmptySpaceError):
        return None
    peaks = [space.step(each) for each in space.candidates]
    least = min(peaks, key=space.required_bytes, default=None)
    if least is None or space.required_bytes(least) > memory_limit(changed, report.hardware):
        return None
    return Relaxation(
        kind=kind,
        change=words,
        settings=settings,
        predicted_peak_bytes=least.memory.total,
        required_bytes=space.required_bytes(least),
    )


def _single_changes(request: ExplorationRequest) -> Iterator[Change]:
    """Yield the changes of one field, the nearest values first."""
    policies = POLICIES if request.recompute is None else request.space.recompute_policies
    if Recompute.FULL not in policies:
        yield RelaxationKind.RECOMPUTE, "recompute full", {"recompute": ["full"]}
    for level in Sharding:
        if level.level > request.space.highest_sharding.level:
            yield RelaxationKind.SHARDING, f"sharding {level}", _sharded(request, level)
    for name in SIZES:
        asked = named_sizes(getattr(request.parallelism, name))
        for size in divisors(request.num_devices):
            if asked is not None and size > max(asked):
                yield RelaxationKind.PARALLELISM, f"{name} {size}", _parallel(request, {name: size})
    smallest = request.space.all_micro_batch_sizes[0]
    while smallest > 1:
        smallest //= 2
        yield RelaxationKind.MICRO_BATCH_SIZE, f"micro_batch_size {smallest}", {"micro_batch_size": smallest}
    for words, settings in _more_devices(request):
        yield RelaxationKind.NUM_DEVICES, words, settings


def _together(request: ExplorationRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield combinations: of the present meshes, then of any mesh, then of any mesh of more devices."""
    recompute = {"recompute": ["full"]}
    for level in Sharding:
        if level.level > request.space.highest_sharding.level:
            yield f"recompute full and sharding {level}", {**recompute, **_sharded(request, level)}
    least = {"micro_batch_size": 1, **recompute, **_sharded(request, Sharding.ZERO3)}
    words = "micro_batch_size 1, recompute full and sharding zero3"
    yield words, least
    names = SIZES if request.shapes.moe is not None else SIZES[:2]
    free = {**least, **_parallel(request, dict.fromkeys(names, "explore"))}
    words = f"{words}, with 'explore' for {' and '.join(names)}"
    yield words, free
    for more, settings in _more_devices(request, 1):
        yield f"{words} and {more}", {**free, **settings}


def _more_devices(request: ExplorationRequest, micro_batch_size: object = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield larger numbers of devices, each with the same batch of a step, and with the nearest that it divides."""
    count = 2 * request.num_devices
    while count <= MOST_DEVICES:
        yield f"num_devices {count}", {"num_devices": count}
        batch = nearest_batch(request, count, micro_batch_size or request.micro_batch_size)
        if request.batch_size not in (None, batch):
            yield f"num_devices {count} and batch_size {batch}", {"num_devices": count, "batch_size": batch}
        count *= 2


def _sharded(request: ExplorationRequest, level: Sharding) -> dict[str, Any]:
    return {"training": request.sharded(level).training.model_dump(mode="json"), "sharding_levels": None}


def _parallel(request: ExplorationRequest, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"parallelism": {**request.parallelism.model_dump(mode="json"), **sizes}}
