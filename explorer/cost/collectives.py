"""The exchanges of devices that train together in a step, and the part of them that computation hides.

Gradients are reduced and, if training state is sharded, parameters are gathered. They are exchanged in units: a layer,
the embedding, or the head. Most of the traffic passes while the device computes. Nothing hides the reduction of the
last unit's gradients, because nothing is left to compute, and nothing hides the gathering of the first unit.

So does torch: fully_shard (Zhao et al., 2023, arXiv:2304.11277) for the ZeRO levels (Rajbhandari et al., 2020,
arXiv:1910.02054), and DistributedDataParallel (Li et al., 2020, arXiv:2006.15704) without sharding.
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
"""The bytes of gradients that DistributedDataParallel reduces at a time."""
ASSUMED_SLOWDOWN = 0.2
"""The slowdown before it is measured. A collective takes a sixth of a GPU's multiprocessors, and memory bandwidth."""
FORWARD_SHARES = {Sharding.NONE: 0.0, Sharding.ZERO1: 0.5, Sharding.ZERO2: 0.5, Sharding.ZERO3: 1 / 3}
"""Share of the traffic that passes in forward, before it is measured.

ZeRO-3 has three exchanges of equal bytes, ZeRO-1 and ZeRO-2 have two; one of them is in forward. Without sharding there
is none in forward.
"""


def is_communication_timed(request: ExplorationRequest, hardware: HardwareSpec) -> bool:
    """Return whether gradients are exchanged and this worker has all the devices that take part."""
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

    `first` comes first in forward and last in backward. A tied embedding contains the head. So does the one unit of all
    parameters outside the layers of a model's own code. `last` is then None.
    """

    first: Unit
    layers: tuple[Unit, ...]
    last: Unit | None

    @property
    def number(self) -> int:
        """The number of units."""
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
    """Return the number format of the buffer from which gradients are reduced.

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
    """The overlap of communication and computation, and the host's work for communication."""

    forward_share_K: Floats  # noqa: N815 - axes are in names
    """The share of forward in each component's device seconds; of communication, the share gathered in forward."""
    slowdown_K: Floats  # noqa: N815 - axes are in names
    """The seconds by which each second of communication delays computation: 0 is hidden at no cost, 1 not at all."""
    host_overhead_2K: Floats  # noqa: N815 - axes are in names
    """The host's seconds for communication in each micro-step, and its additional seconds once a step."""
    computes: bool = False
    """Whether the host is the device. Otherwise it works ahead of the device."""


@dataclass(frozen=True, slots=True)
class ShardingCommunication:
    """The exchanges of a level of sharding, and their times.

    With ZeRO-3, each forward pass gathers every unit. Each backward pass gathers all units but the last again, and
    reduces every unit's gradients. With ZeRO-1 and ZeRO-2, parameters are gathered once a step. ZeRO-2 reduces
    gradients in each micro-step, and ZeRO-1 only in the last. Without sharding, the reduction in the last micro-step is
    the only exchange.
    """

    sharding: Sharding
    exposed_share: float
    """The share of the first unit in the bytes."""
    again_share: float
    """The share of the units that backward gathers again."""

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
