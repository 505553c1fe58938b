"""Seconds of transfers between devices that are there, interpolated between the sizes that were measured."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bexp.explorer.cost_model.components import Component, ComponentKind, ExchangeSpec, Operation
from bexp.explorer.cost_model.transfers import Group, Link, Transfer, Transfers
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.spec.mesh import Mesh
from bexp.explorer.spec.request import ExplorationRequest

SMALLEST_BYTES = 1 << 16
SIZES = 4
"""Sizes of each operation, from the smallest to the largest, with equal ratios between them."""
LARGEST_BYTES = 1 << 28
ASSUMED_BYTES_PER_SECOND = {"cuda": 1e11, "cpu": 1e9}
"""The rate that meshes are ranked by until transfers are measured."""


def transfer_components(request: ExplorationRequest, meshes: Iterable[Mesh]) -> tuple[Component, ...]:
    """Return what must be measured, so that the transfers of all `meshes` are known."""
    model = request.shapes
    hidden = max(request.space.plan_micro_batch_sizes) * model.seq_length * model.hidden_size * model.dtype.itemsize
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


class MeasuredTransfers(Transfers):
    """The transfers of the worker's devices.

    Between two measured sizes, seconds are interpolated in proportion to the bytes. Above the largest they grow with
    the bytes, and below the smallest they are those of the smallest. What is not measured yet has an assumed rate. On a
    CPU the host issues a transfer within its seconds.
    """

    def __init__(self, measurements: Iterable[ComponentMeasurement], device_kind: str) -> None:
        self._host_issues = device_kind != "cpu"
        self._assumed = ASSUMED_BYTES_PER_SECOND[device_kind]
        points: dict[tuple[Operation, Group], list[tuple[int, float, float]]] = {}
        for each in measurements:
            if (asked := each.component.exchange) is not None:
                key = asked.operation, Group(asked.size, asked.stride)
                points.setdefault(key, []).append((asked.num_bytes, each.device_seconds, each.host_seconds))
        self._points = {key: sorted(values) for key, values in points.items()}

    def gather(self, size_bytes: float, group: Group) -> Transfer:
        """Return the mean of an all-gather and a reduce-scatter."""
        gathered = self._transfer(Operation.ALL_GATHER, size_bytes, group)
        scattered = self._transfer(Operation.REDUCE_SCATTER, size_bytes, group)
        seconds, host = (
            (getattr(gathered, name) + getattr(scattered, name)) / 2 for name in ("seconds", "host_seconds")
        )
        return Transfer(seconds, Link.DEVICES, host)

    def all_to_all(self, size_bytes: float, group: Group) -> Transfer:
        """Return a transfer in which the busiest device receives `size_bytes`."""
        return self._transfer(Operation.ALL_TO_ALL, size_bytes, group)

    def send(self, size_bytes: float, ranks: Group) -> Transfer:
        """Return what a rank of a pipeline sends to the next."""
        return self._transfer(Operation.SEND, size_bytes, ranks)

    def broadcast(self, size_bytes: float, group: Group) -> Transfer:
        """Return what copies `size_bytes` of one device to all others of a group; their sum takes as long."""
        return self._transfer(Operation.BROADCAST, size_bytes, group)

    def _transfer(self, operation: Operation, size_bytes: float, group: Group) -> Transfer:
        if group.size == 1 or not size_bytes:
            return Transfer(0.0, Link.DEVICES)
        points = self._points.get((operation, group))
        if points is None:
            return Transfer(size_bytes / self._assumed, Link.DEVICES)
        sizes, seconds, hosts = zip(*points, strict=True)
        host = float(np.median(hosts)) if self._host_issues else 0.0
        if size_bytes > sizes[-1]:
            return Transfer(float(seconds[-1] * size_bytes / sizes[-1]), Link.DEVICES, host)
        return Transfer(float(np.interp(size_bytes, sizes, seconds)), Link.DEVICES, host)
