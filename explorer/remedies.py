"""When nothing fits: the smallest change to the request that would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from explorer.candidates import Recompute
from explorer.composition import GIB, memory_limit, static_parts
from explorer.hardware import DeviceReport
from explorer.memory import predict_memory
from explorer.models import ModelSpec
from explorer.requests import BTASpec, ExplorationRequest
from explorer.space import EmptySpaceError, enumerate_candidates
from explorer.table import SpaceTable
from explorer.training import Sharding

MAX_DEVICES = 1024


def explain_nothing_fits(request: ExplorationRequest, report: DeviceReport, model: ModelSpec) -> str:
    """Why no candidate fits, and the first change that would make one fit.

    Changes are tried in the order of what they cost: a smaller micro-batch, a recomputation policy, what the request
    excludes for no gain (tiling, the chunked loss, back ends), more devices, a sharding level; then several together.
    """
    limit = memory_limit(request, report.hardware)
    smallest = smallest_requirement(request, report, model)
    static = static_parts(model, request).total
    why = (
        f"no candidate fits in {limit / GIB:.2f} GiB: training state alone takes {static / GIB:.2f} GiB, "
        f"and the smallest candidate is predicted to need {smallest / GIB:.2f} GiB"
    )
    for change, changed in _changes(request):
        try:
            needed = smallest_requirement(changed, report, model)
        except EmptySpaceError:
            continue
        if needed <= memory_limit(changed, report.hardware):
            return f"{why}. It would fit with {change} (predicted to need {needed / GIB:.2f} GiB)"
    return f"{why}. No micro-batch, recomputation or sharding over {MAX_DEVICES} devices would make it fit"


def smallest_requirement(request: ExplorationRequest, report: DeviceReport, model: ModelSpec) -> int:
    """Predicted bytes that the smallest candidate of a request needs, context and margin included."""
    space = enumerate_candidates(request, report, model)
    table = SpaceTable(space.candidates, model, request)
    return round(float(predict_memory(table, report.hardware).min()))


def _changes(request: ExplorationRequest) -> Iterator[tuple[str, ExplorationRequest]]:
    smallest = min(request.micro_batch_sizes)
    smaller = [m for m in (1 << i for i in range(8, -1, -1)) if m < smallest]
    for m in smaller:
        yield f"micro_batch_size {m}", _change(request, micro_batch_size=m)
    training = request.mode == "train"
    if training and Recompute.FULL not in request.recompute_policies:
        for policy in _change(request, recompute=None).recompute_policies:
            if policy is not Recompute.NONE:
                yield f"recompute {policy}", _change(request, recompute=(policy,))
    if request.training.loss.kind == "full":
        loss = request.training.loss.model_copy(update={"kind": "chunked"})
        yield "the chunked loss", _change(request, training=request.training.model_copy(update={"loss": loss}))
    if request.bta.enable is False:
        yield "batch tiling on attention", _change(request, bta=BTASpec())
    if request.attention_backends is not None:
        yield "every attention back end", _change(request, attention_backends=None)
    if not training:
        return
    counts = [n for n in (1 << i for i in range(1, 11)) if n > request.num_devices]
    if request.training.sharding is not Sharding.NONE:
        for count in counts:
            yield f"num_devices {count}", _over(request, count, request.training.sharding)
    for sharding in (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3):
        if request.num_devices > 1 and sharding.level > request.training.sharding.level:
            yield f"sharding {sharding}", _over(request, request.num_devices, sharding)
    least = _change(request, micro_batch_size=1, recompute=(Recompute.FULL,))
    if request.num_devices > 1:
        yield (
            f"micro_batch_size 1, recompute full and sharding zero3 over {request.num_devices} devices",
            _over(least, request.num_devices, Sharding.ZERO3),
        )
    for count in counts:
        yield f"sharding zero3 over {count} devices", _over(request, count, Sharding.ZERO3)
    for count in counts:
        yield (
            f"micro_batch_size 1, recompute full and sharding zero3 over {count} devices",
            _over(least, count, Sharding.ZERO3),
        )


def _over(request: ExplorationRequest, num_devices: int, sharding: Sharding) -> ExplorationRequest:
    per_device = max(1, request.batch_size // request.num_devices)
    training = request.training.model_copy(update={"sharding": sharding})
    return _change(request, num_devices=num_devices, batch_size=per_device * num_devices, training=training)


def _change(request: ExplorationRequest, **update: Any) -> ExplorationRequest:
    return request.model_copy(update=update)
