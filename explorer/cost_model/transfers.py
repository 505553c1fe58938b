"""Seconds of transfers over links that a request describes.

Devices are numbered so that tensor-parallel ones are neighbours, then data-parallel ones, then the ranks of a pipeline,
as Megatron-Core and torchtitan number them. A group of `size` devices lies `stride` apart.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from bexp.explorer.spec.fabric import FabricSpec, LinkSpec

GIGA = 1e9
MICRO = 1e-6


class Link(StrEnum):
    """The slowest link that a transfer passes."""

    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"
    DEVICES = "devices"
    """Whatever links the devices of a worker, on which transfers were measured."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The seconds of one transfer; `link` sets its pace. The host issues it in `host_seconds`, where that is known."""

    seconds: float
    link: Link = Link.INTRA_NODE
    host_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Devices between which something passes."""

    size: int
    stride: int


class Transfers(ABC):
    """The seconds of transfers."""

    @abstractmethod
    def gather(self, size_bytes: float, group: Group) -> Transfer:
        """Return an all-gather, or a reduce-scatter, after which a device has had `size_bytes` in all."""

    @abstractmethod
    def all_to_all(self, size_bytes: float, group: Group) -> Transfer:
        """Return a transfer in which the busiest device sends or receives `size_bytes`, an equal part for each."""

    @abstractmethod
    def send(self, size_bytes: float, ranks: Group) -> Transfer:
        """Return what a rank of a pipeline sends to the next; the slowest pair of ranks counts."""

    @abstractmethod
    def broadcast(self, size_bytes: float, group: Group) -> Transfer:
        """Return what copies `size_bytes` of one device to all others of a group, or sums theirs at that device."""


class Fabric(Transfers):
    """The transfers of a described machine."""

    def __init__(self, spec: FabricSpec) -> None:
        self._spec = spec

    def gather(self, size_bytes: float, group: Group) -> Transfer:
        """Return an all-gather, or a reduce-scatter, after which a device has had `size_bytes` in all.

        A ring passes (n - 1) / n of them over each device's links. Between nodes it uses the adapters of all members
        that a node has. Latency is that of a tree.
        """
        if group.size == 1 or not size_bytes:
            return Transfer(0.0)
        within = self._within(group)
        moved = size_bytes * (group.size - 1) / group.size
        hops = math.ceil(math.log2(group.size))
        node = self._spec.intra_node
        if within == group.size:
            return Transfer(moved / _rate(node) + hops * MICRO * node.microseconds)
        link = self._between()
        rate = within * _rate(link) if within == 1 else min(_rate(node), within * _rate(link))
        return Transfer(moved / rate + hops * MICRO * link.microseconds, Link.INTER_NODE)

    def all_to_all(self, size_bytes: float, group: Group) -> Transfer:
        """Return a transfer in which the busiest device sends or receives `size_bytes`, an equal part for each."""
        if group.size == 1 or not size_bytes:
            return Transfer(0.0)
        within, node = self._within(group), self._spec.intra_node
        near = size_bytes * (within - 1) / group.size / _rate(node) + MICRO * node.microseconds
        if within == group.size:
            return Transfer(near)
        link = self._between()
        far = size_bytes * (group.size - within) / group.size / _rate(link) + MICRO * link.microseconds
        return Transfer(max(near, far), Link.INTER_NODE if far >= near else Link.INTRA_NODE)

    def send(self, size_bytes: float, ranks: Group) -> Transfer:
        """Return what a rank of a pipeline sends to the next; the slowest pair of ranks counts."""
        if ranks.size == 1:
            return Transfer(0.0)
        node = self._spec.intra_node
        if ranks.size * ranks.stride <= node.devices:
            return Transfer(size_bytes / _rate(node) + MICRO * node.microseconds)
        link = self._between()
        return Transfer(size_bytes / _rate(link) + MICRO * link.microseconds, Link.INTER_NODE)

    def broadcast(self, size_bytes: float, group: Group) -> Transfer:
        """Return what copies `size_bytes` of one device to all others of a group, or sums theirs at that device.

        All bytes pass each device's links; of a gather, the (n - 1) / n do that a device lacks.
        """
        return Transfer(0.0) if group.size == 1 else self.gather(size_bytes * group.size / (group.size - 1), group)

    def _within(self, group: Group) -> int:
        """Return how many members of a group a node has."""
        return max(1, min(group.size, self._spec.intra_node.devices // group.stride))

    def _between(self) -> LinkSpec:
        assert self._spec.inter_node is not None, "the request is refused without it"
        return self._spec.inter_node


def _rate(link: LinkSpec) -> float:
    return GIGA * link.gigabytes_per_second
