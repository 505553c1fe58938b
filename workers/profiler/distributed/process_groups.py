"""The ranks of a group profiler: who runs a trial together, and over which process groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.ring import Ring, ring_group
from explorer.cost_model.components import Component, ComponentKind
from explorer.records.trial import TrialPlan
from workers.profiler.rank_group import ALONE, Barrier, RankGroup, check_size

OPERATION_TIMEOUT = timedelta(hours=6)
"""Longer than any trial's deadline, which is what ends a rank that waits for another."""


class ProcessGroups:
    """All ranks of the world. NCCL carries what GPUs exchange; what their hosts agree on goes through gloo.

    The world is not bound to its devices (`device_id`): with a bound one, `new_group` splits a communicator on ranks
    that the new group does not have, and for a group of gloo's on those alone, which then wait for the others for ever.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=OPERATION_TIMEOUT,
        )
        self._host_groups: dict[int, dist.ProcessGroup] = {}
        self._members: dict[int, dist.ProcessGroup] = {}
        self._rings: dict[int, dist.ProcessGroup] = {}
        self._gathered: set[int] = set()
        self._ring_sizes: set[int] = set()
        self._gather(size)  # what its connections take of the devices is seen when these are measured

    def prepare(self, plan: TrialPlan) -> None:
        """Make the process groups of a trial, with every rank of the world, whether it takes part or not."""
        n = plan.num_processes
        if not 1 < n <= self.size:
            return
        sizes = [size for size in plan.context_parallel_sizes if size not in self._ring_sizes]
        if n in self._gathered and not sizes:
            return
        if self._device.type == "cuda":
            # Connections are made of memory that the allocator may have cached.
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if n not in self._gathered:
            self._gather(n)
        for size in sizes:
            self._make_rings(size)

    def takes_part(self, plan: TrialPlan) -> bool:
        """Whether this rank runs the trial: the first ranks do. One that is too large for the world all refuse."""
        return self.rank < plan.num_processes

    def ranks(self, plan: TrialPlan) -> RankGroup:
        """Those that run the trial, this rank among them; UnsupportedTrialError if there are too few."""
        check_size(plan, self.size)
        n = plan.num_processes
        if n == 1:
            return ALONE
        return DistributedRanks(self.rank, n, self._host_groups[n], self._members[n], self._rings, self._device)

    def _gather(self, n: int) -> None:
        """Groups of the first `n` ranks, with every rank of the world."""
        self._gathered.add(n)
        ranks = list(range(n))
        reducer = dist.new_group(ranks, backend="gloo", timeout=OPERATION_TIMEOUT)
        members = dist.new_group(ranks, timeout=OPERATION_TIMEOUT)
        if self.rank < n:
            assert isinstance(reducer, dist.ProcessGroup), "this rank is a member"
            assert isinstance(members, dist.ProcessGroup), "this rank is a member"
            self._host_groups[n], self._members[n] = reducer, members
            self._connect(members)

    def _make_rings(self, size: int) -> None:
        self._ring_sizes.add(size)
        for first in range(0, self.size - size + 1, size):
            ranks = list(range(first, first + size))
            try:
                ring = ring_group(ranks, OPERATION_TIMEOUT)
            except ValueError:  # another rank's
                continue
            self._rings[size] = ring
        if size in self._rings:
            self._connect(self._rings[size])

    def _connect(self, group: dist.ProcessGroup) -> None:
        """Make the connections of a group of NCCL's outside of any trial, for collectives and to the neighbours."""
        if self._device.type == "cuda" and group.size() > 1:
            sent, received = (torch.zeros(1, device=self._device) for _ in range(2))
            dist.all_reduce(sent, group=group)
            Ring(group).pass_on(sent, received).wait()
            torch.cuda.synchronize(self._device)


class DistributedRanks:
    """The first ranks of a groups, which run a trial together."""

    def __init__(
        self,
        rank: int,
        size: int,
        reducer: dist.ProcessGroup,
        members: dist.ProcessGroup,
        rings: dict[int, dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        self.rank, self.size = rank, size
        self.members: dist.ProcessGroup | None = members
        self._host_group = reducer
        self._rings = rings
        self._device = device

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """The largest of each value over the ranks."""
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._host_group)
        return tuple(shared.tolist())

    def context_parallel(self, size: int, layout: str) -> ContextParallel:
        """The ring of this rank: ranks 0 to size - 1, or the next ones."""
        return ContextParallel(self._rings[size], layout)

    def barrier(self, component: Component) -> Barrier | None:
        """Of the ring, or of all where all exchange."""
        if component.kind is ComponentKind.COMMUNICATION:
            group = self.members
        elif component.communicates:
            group = self._rings[component.context_parallel_size]
        else:
            return None
        token = torch.zeros(1, device=self._device)

        def meet() -> None:
            dist.all_reduce(token, group=group)  # NCCL: the stream waits, not the host

        return meet
