"""Seconds of transfers between devices, interpolated between the sizes that were measured.

Devices are numbered so that tensor-parallel ones are neighbours, then data-parallel ones, then the ranks of a pipeline,
as Megatron-Core and torchtitan number them. A group of `size` devices lies `stride` apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.components import Component, ComponentKind, ExchangeSpec, Operation
from bexp.explorer.meshes.mesh import Mesh
from bexp.explorer.request.request import ExplorationRequest

SMALLEST_BYTES = 1 << 16
SIZES = 4
"""Sizes of each operation, from the smallest to the largest, with equal ratios between them."""
LARGEST_BYTES = 1 << 28
ASSUMED_BYTES_PER_SECOND = {"cuda": 1e11, "cpu": 1e9}
"""The rate that meshes are ranked by until transfers are measured."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The seconds of one transfer. The host issues it in `host_seconds`."""

    seconds: float
    host_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Devices between which something passes."""

    size: int
    stride: int


def transfer_components(request: ExplorationRequest, meshes: Iterable[Mesh]) -> tuple[Component, ...]:
    """Return what must be measured, so that the transfers of all `meshes` are known."""
    model = request.shapes
    hidden = max(request.space.all_micro_batch_sizes) * model.seq_length * model.hidden_size * model.dtype.itemsize
    largest = min(LARGEST_BYTES, max(hidden, 4 * SMALLEST_BYTES))
    both = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER)
    wanted: dict[tuple[Operation, Group], None] = {}
    for mesh in meshes:
        groups = [(operation, Group(mesh.tensor, 1)) for operation in both]
        groups += [(operation, Group(mesh.data, mesh.tensor)) for operation in both]
        groups.append((Operation.SEND, Group(mesh.pipeline, mesh.tensor * mesh.data)))
        if mesh.expert > 1:
            groups.append((Operation.ALL_TO_ALL, Group(mesh.expert, 1)))
            groups += [(operation, Group(mesh.expert_data, mesh.expert)) for operation in both]
            if mesh.shadowed_experts:
                groups.append((Operation.BROADCAST, Group(mesh.expert, 1)))
        wanted |= dict.fromkeys(each for each in groups if each[1].size > 1)
    sizes = np.geomspace(SMALLEST_BYTES, largest, SIZES).round().astype(int).tolist()
    return tuple(
        Component(
            kind=ComponentKind.EXCHANGE,
            micro_batch_size=0,
            exchange=ExchangeSpec(operation=operation, size=group.size, stride=group.stride, num_bytes=size),
        )
        for operation, group in wanted
        for size in sizes
    )


class Transfers:
    """The transfers of the worker's devices.

    Between two measured sizes, seconds are interpolated in proportion to the bytes. Above the largest they grow with
    the bytes, and below the smallest they are those of the smallest. What is not measured yet has an assumed rate. On a
    CPU the host issues a transfer within its seconds.
    """

    def __init__(self, measured: Mapping[ExchangeSpec, tuple[float, float]], device_kind: str) -> None:
        """`measured` are the seconds of the device and those of the host."""
        self._host_issues = device_kind != "cpu"
        self._assumed = ASSUMED_BYTES_PER_SECOND[device_kind]
        points: dict[tuple[Operation, Group], list[tuple[int, float, float]]] = {}
        for asked, seconds in measured.items():
            key = asked.operation, Group(asked.size, asked.stride)
            points.setdefault(key, []).append((asked.num_bytes, *seconds))
        self._points = {key: sorted(values) for key, values in points.items()}

    def gather(self, size_bytes: float, group: Group) -> Transfer:
        """Return an all-gather, or a reduce-scatter, after which a device has had `size_bytes` in all: their mean."""
        gathered = self.take(Operation.ALL_GATHER, size_bytes, group)
        scattered = self.take(Operation.REDUCE_SCATTER, size_bytes, group)
        return Transfer(
            (gathered.seconds + scattered.seconds) / 2, (gathered.host_seconds + scattered.host_seconds) / 2
        )

    def take(self, operation: Operation, size_bytes: float, group: Group) -> Transfer:
        """Return one operation of a group.

        In an all-to-all the busiest device sends or receives `size_bytes`, an equal part for each other. A rank of a
        pipeline sends them to the next, and the slowest pair counts. A broadcast copies those of one device to all
        others, and their sum takes as long.
        """
        if group.size == 1 or not size_bytes:
            return Transfer(0.0)
        points = self._points.get((operation, group))
        if points is None:
            return Transfer(size_bytes / self._assumed)
        sizes, seconds, hosts = zip(*points, strict=True)
        host = float(np.median(hosts)) if self._host_issues else 0.0
        if size_bytes > sizes[-1]:
            return Transfer(float(seconds[-1] * size_bytes / sizes[-1]), host)
        return Transfer(float(np.interp(size_bytes, sizes, seconds)), host)
