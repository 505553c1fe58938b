"""What devices that train together exchange in a step, and how much of it computation hides.

Gradients are reduced and, if training state is sharded, parameters are gathered. They are exchanged in units: a layer,
the embedding, or the head. Most of the traffic passes while the device computes. Nothing hides the reduction of the
last unit's gradients, because nothing is left to compute, and nothing hides the gathering of the first unit.

This is how torch does it: fully_shard (Zhao et al., 2023, arXiv:2304.11277) for the ZeRO levels (Rajbhandari et al.,
2020, arXiv:1910.02054), and DistributedDataParallel (Li et al., 2020, arXiv:2006.15704) without sharding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bexp.explorer.cost.parameters import count_embedding, count_head, count_layer
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import DType, LayerKind
from bexp.explorer.model.parts import ExploredModel, ModelParts, Part
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

BUCKET_BYTES = 25 << 20
"""Gradients that DistributedDataParallel reduces at a time."""
ASSUMED_SLOWDOWN = 0.2
"""The slowdown before it is measured. A collective takes a sixth of a GPU's multiprocessors, and memory bandwidth."""
FORWARD_SHARES = {Sharding.NONE: 0.0, Sharding.ZERO1: 0.5, Sharding.ZERO2: 0.5, Sharding.ZERO3: 1 / 3}
"""Share of the traffic that passes in forward, before it is measured.

ZeRO-3 has three exchanges of equal bytes, ZeRO-1 and ZeRO-2 have two; one of them is in forward. Without sharding there
is none in forward.
"""


def is_communication_timed(request: ExplorationRequest, hardware: HardwareSpec) -> bool:
    """Return whether gradients are exchanged, and this worker has all the devices that take part."""
    return request.mode == "train" and 1 < request.num_devices <= hardware.num_devices


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together, and gradients that are reduced together; the model has `count` such units.

    Both are counted in numbers of the model's dtype. A unit with frozen parameters has fewer gradients.
    """

    num_parameters: int
    num_gradients: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class CommunicationUnits:
    """The units of a model.

    `first` comes first in forward and last in backward. A tied embedding contains the head, and so
    does the unit of what a model's own code has outside its layers; `last` is then None.
    """

    first: Unit
    layers: tuple[Unit, ...]
    last: Unit | None

    @property
    def number(self) -> int:
        """How many units there are."""
        return 1 + sum(layer.count for layer in self.layers) + (self.last is not None)

    @classmethod
    def of(cls, model: ExploredModel) -> CommunicationUnits:
        """Return the units of `model`."""
        if isinstance(model, ModelParts):
            kinds = [_unit_of(kind, model, model.layers.count(kind.name)) for kind in model.kinds]
            return cls(first=_unit_of(model.shell, model), layers=tuple(kinds), last=None)
        sizes = [(count_layer(model, kind), model.count_layers(kind)) for kind in LayerKind]
        head = count_head(model)
        tied = model.tie_embeddings
        first = count_embedding(model) + (head if tied else 0)
        return cls(
            first=Unit(first, first),
            layers=tuple(Unit(size, size, count) for size, count in sizes if count),
            last=None if tied else Unit(head, head),
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of all units."""
        return sum(unit.count * unit.num_parameters for unit in self._all)

    @property
    def num_gradients(self) -> int:
        """Gradients of all units."""
        return sum(unit.count * unit.num_gradients for unit in self._all)

    @property
    def _all(self) -> tuple[Unit, ...]:
        return (self.first, *self.layers, *(() if self.last is None else (self.last,)))


def buffered_dtype(model: ExploredModel, request: ExplorationRequest) -> DType:
    """Return the number format of the buffer that gradients are reduced from.

    A model's own code keeps gradients in the format of its parameters.
    """
    if isinstance(model, ModelParts):
        return model.dtype
    return request.training.optimizer.gradient_dtype(model.dtype)


def _unit_of(part: Part, model: ModelParts, count: int = 1) -> Unit:
    item = model.dtype.itemsize
    return Unit(-(-part.parameter_bytes // item), -(-part.trainable_bytes // item), count)


@dataclass(frozen=True, slots=True)
class Overlap:
    """How communication and computation overlap, and the host's work for communication.

    `forward_share_K` is the share of each component's device seconds that its forward pass takes; for communication it
    is the share that is gathered in forward. `slowdown_K` applies to communication: the seconds of computation that are
    lost for each second that the communication takes by itself. With 0 it is hidden at no cost, with 1 not at all.

    `host_overhead_2K` are the host's seconds for communication in each micro-step, and those that come on top once a
    step. The host works ahead of the device, unless `computes` says that the host is the device.
    """

    forward_share_K: Floats  # noqa: N815 - axes are in names
    slowdown_K: Floats  # noqa: N815 - axes are in names
    host_overhead_2K: Floats  # noqa: N815 - axes are in names
    computes: bool = False


@dataclass(frozen=True, slots=True)
class ShardingCommunication:
    """What a level of sharding exchanges, and when.

    With ZeRO-3, each forward pass gathers every unit. Each backward pass gathers all units but the last again, and
    reduces every unit's gradients. With ZeRO-1 and ZeRO-2, parameters are gathered once a step. ZeRO-2 reduces
    gradients in each micro-step, and ZeRO-1 in the last one alone. Without sharding, the reduction in the last
    micro-step is the only exchange.

    `exposed_share` is the first unit's share of the bytes, `again_share` that of the units gathered in backward.
    """

    sharding: Sharding
    exposed_share: float
    again_share: float

    @classmethod
    def of(cls, model: ExploredModel, request: ExplorationRequest) -> ShardingCommunication:
        """Return the communication of a model as the request trains it."""
        units = CommunicationUnits.of(model)
        sharding = request.training.sharding
        first, number = units.first.num_parameters, units.num_parameters
        if sharding is Sharding.NONE:  # the embedding's bucket is reduced last
            item = buffered_dtype(model, request).itemsize
            number = units.num_gradients
            embedding = units.first.num_gradients if isinstance(model, ModelParts) else count_embedding(model)
            first = min(number, max(embedding, BUCKET_BYTES // item))
        kept = (units.last or units.first).num_parameters
        return cls(sharding, first / number, 1.0 - kept / number)

    def visible_seconds(
        self, gather: Floats, rest: Floats, forward: Floats, backward: Floats, slowdown: float
    ) -> tuple[Floats, Floats]:
        """Return the seconds that traffic adds to each micro-step, and once to each step.

        All arrays have one shape. `gather` are the seconds of the whole model's traffic in forward, `rest` those in
        backward. `forward` and `backward` are the seconds of a micro-step's computation. `slowdown` is that of
        `Overlap`.
        """
        import numpy as np  # noqa: PLC0415 - it takes long to import, and every command of `bexp` imports this module

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
    """Return the seconds beyond the computation.

    They are the exposed traffic, and the longer of two: the hidden traffic, or the computation that it slows down.
    """
    import numpy as np  # noqa: PLC0415 - as above

    hidden = traffic - exposed
    return np.asarray(exposed + np.maximum(hidden, computation + slowdown * hidden) - computation)
