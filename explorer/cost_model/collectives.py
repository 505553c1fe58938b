"""What devices that train together exchange in a step, and how much of it computation hides.

Gradients are reduced and, where training state is sharded, parameters gathered, unit by unit: a layer at a time, the
embedding, the head. Most of it passes while the device computes. The last unit's gradients do not, since nothing is
left to compute, nor does the first unit's gather. As torch does it: fully_shard (Zhao et al., 2023, arXiv:2304.11277)
for the ZeRO levels (Rajbhandari et al., 2020, arXiv:1910.02054), DistributedDataParallel (Li et al., 2020,
arXiv:2006.15704) without sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from explorer.cost_model.parameters import count_embedding, count_head, count_layer, count_parameters
from explorer.spec.hardware import HardwareSpec
from explorer.spec.model import LayerKind
from explorer.spec.parts import ExploredModel, ModelParts
from explorer.spec.request import ExplorationRequest
from explorer.spec.training import Sharding

Floats = npt.NDArray[np.float64]

BUCKET_BYTES = 25 << 20
"""What DistributedDataParallel reduces at a time."""
ASSUMED_SLOWDOWN = 0.2
"""Before it is measured. A collective takes a sixth of the multiprocessors of a GPU, and memory bandwidth beside."""
FORWARD_SHARES = {Sharding.NONE: 0.0, Sharding.ZERO1: 0.5, Sharding.ZERO2: 0.5, Sharding.ZERO3: 1 / 3}
"""Of the traffic, before it is measured: three exchanges of equal bytes with ZeRO-3, else two, or none in forward."""


def is_exchange_timed(request: ExplorationRequest, hardware: HardwareSpec) -> bool:
    """Whether gradients are exchanged at all, and this worker has all the devices that take part."""
    return request.mode == "train" and 1 < request.num_devices <= hardware.num_devices


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered and reduced together; the model has `count` such units."""

    num_parameters: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class ExchangeUnits:
    """The units of a model: `first` comes first in forward and last in backward; a tied embedding contains the head.

    `last` is null then.
    """

    first: Unit
    layers: tuple[Unit, ...]
    last: Unit | None

    @property
    def number(self) -> int:
        """How many there are."""
        return 1 + sum(layer.count for layer in self.layers) + (self.last is not None)

    @classmethod
    def of(cls, model: ExploredModel) -> ExchangeUnits:
        """Of `model`."""
        if isinstance(model, ModelParts):
            kinds = [Unit(kind.num_parameters, model.layers.count(kind.name)) for kind in model.kinds]
            return cls(first=Unit(model.shell.num_parameters), layers=tuple(kinds), last=None)
        layers = [Unit(count_layer(model, kind), model.count_layers(kind)) for kind in LayerKind]
        head = count_head(model)
        tied = model.tie_embeddings
        return cls(
            first=Unit(count_embedding(model) + (head if tied else 0)),
            layers=tuple(layer for layer in layers if layer.count),
            last=None if tied else Unit(head),
        )


@dataclass(frozen=True, slots=True)
class Overlap:
    """How traffic and computation pass at once, and what the host has to do about it.

    `forward_share_K` is the share of each component's device seconds that its forward pass takes (of the traffic: what
    is gathered in forward). `slowdown_K` is, of traffic, the computation that is lost while it passes, in seconds of
    computation for each second that the traffic takes by itself: 0 hides it for nothing, 1 not at all.

    `host_overhead_2K` are the seconds of the host that traffic takes in each micro-step, and once a step more. The host
    works ahead of the device, unless it `computes` itself.
    """

    forward_share_K: Floats  # noqa: N815 - axes are in names
    slowdown_K: Floats  # noqa: N815 - axes are in names
    host_overhead_2K: Floats  # noqa: N815 - axes are in names
    computes: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """When a level of sharding exchanges what.

    With ZeRO-3 each forward pass gathers every unit and each backward pass gathers all but the last again, and reduces
    every unit's gradients. With ZeRO-2 parameters are gathered once a step, gradients reduced in each micro-step; with
    ZeRO-1, in the last; without sharding there is only the reduction in the last.

    `exposed_share` is the first unit's share of the bytes, `again_share` that of what is gathered in backward.
    """

    sharding: Sharding
    exposed_share: float
    again_share: float

    @classmethod
    def of(cls, model: ExploredModel, request: ExplorationRequest) -> Exchange:
        """Of a model as the request trains it."""
        units, number = ExchangeUnits.of(model), count_parameters(model)
        sharding = request.training.sharding
        first = units.first.num_parameters
        if sharding is Sharding.NONE:  # nothing holds the head's gradients back; the embedding's bucket is the last
            item = request.training.optimizer.gradient_dtype(model.dtype).itemsize
            embedding = first if isinstance(model, ModelParts) else count_embedding(model)
            first = min(number, max(embedding, BUCKET_BYTES // item))
        kept = (units.last or units.first).num_parameters
        return cls(sharding, first / number, 1.0 - kept / number)

    def visible_seconds(
        self, gather: Floats, rest: Floats, forward: Floats, backward: Floats, slowdown: float
    ) -> tuple[Floats, Floats]:
        """What the traffic adds to each micro-step, and to each step once; arrays of any one shape.

        `gather` are the seconds of the traffic in forward, `rest` of that in backward, of the whole model; `forward`
        and `backward` those of a micro-step's computation.
        """
        exposed = self.exposed_share
        gathering = _added(forward, gather, exposed * gather, slowdown)
        nothing = np.zeros_like(forward)
        if self.sharding is Sharding.ZERO3:
            reduced = np.maximum(0.0, rest - self.again_share * gather)
            return gathering + _added(backward, rest, exposed * reduced, slowdown), nothing
        reducing = _added(backward, rest, exposed * rest, slowdown)
        if self.sharding is Sharding.ZERO2:
            return reducing, gathering
        return nothing, (reducing if self.sharding is Sharding.NONE else gathering + reducing)


def _added(computation: Floats, traffic: Floats, exposed: Floats, slowdown: float) -> Floats:
    """Beyond the computation: what nothing hides, and what of the rest the computation cannot, or loses to it."""
    hidden = traffic - exposed
    return np.asarray(exposed + np.maximum(hidden, computation + slowdown * hidden) - computation)
