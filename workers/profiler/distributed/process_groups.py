"""The process groups of a group profiler, and the ranks that run a trial together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.model.base import Frozen
from bexp.explorer.records.trial import TrialTask
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.kernels.context_parallel.ring import Ring, ring_group
from bexp.measure.heap import freeze_imports
from bexp.workers.devices.discovery import open_gpu
from bexp.workers.instruments.device_monitor import DeviceMonitor
from bexp.workers.instruments.rank_group import SINGLE_RANK, Barrier, RankGroup, check_size
from bexp.workers.process.protocol import Hello, Refused, RunTrial
from bexp.workers.profiler.device import DeviceRefusedError, open_instruments
from bexp.workers.profiler.distributed.message_queue import MessageQueue, join_store
from bexp.workers.profiler.hardware import identify, used_bytes
from bexp.workers.profiler.session import Session
from bexp.workers.settings import read_settings

OPERATION_TIMEOUT = timedelta(hours=6)
"""Longer than any trial's deadline, so that the deadline ends a rank that waits for another."""

Strided = tuple[int, int, int]
"""How many ranks take part, the size of a group, and how far apart its members are."""


class ProcessGroups:
    """The process groups of all ranks. GPUs exchange data through NCCL, and hosts exchange numbers through gloo.

    The default group is not bound to devices (`device_id`). Otherwise `new_group` would split its communicator also on
    ranks outside the new group. For a gloo group only those would split it, and wait for ever.
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
        self._group_sizes: set[int] = set()
        self._ring_sizes: set[int] = set()
        self._strided: dict[Strided, dist.ProcessGroup | None] = {}
        self._make_groups(size)  # before the hardware is measured, which then sees the memory of the connections

    def prepare(self, task: TrialTask) -> None:
        """Make the process groups of a trial. All ranks must call this, also those that do not run the trial."""
        n = task.num_processes
        if not 1 < n <= self.size:
            return
        sizes = [size for size in task.context_parallel_sizes if size not in self._ring_sizes]
        strided = [(n, *group) for group in task.groups if (n, *group) not in self._strided]
        if n in self._group_sizes and not sizes and not strided:
            return
        if self._device.type == "cuda":
            # Connections need memory that the allocator may have cached.
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if n not in self._group_sizes:
            self._make_groups(n)
        for size in sizes:
            self._make_rings(size)
        for key in strided:
            self._make_strided(key)

    def takes_part(self, task: TrialTask) -> bool:
        """Return whether this rank runs the trial, as the first ranks do. All answer a trial that needs more ranks."""
        return self.rank < task.num_processes

    def rank_group(self, task: TrialTask) -> RankGroup:
        """Return the ranks that run the trial, this one included. Raises UnsupportedTrialError for too few ranks."""
        check_size(task, self.size)
        n = task.num_processes
        if n == 1:
            return SINGLE_RANK
        return DistributedRankGroup(
            self.rank, n, self._host_groups[n], self._members[n], self._rings, self._device, self._strided
        )

    def _make_groups(self, n: int) -> None:
        """Make the groups of the first `n` ranks. All ranks must call this."""
        self._group_sizes.add(n)
        ranks = list(range(n))
        hosts = dist.new_group(ranks, backend="gloo", timeout=OPERATION_TIMEOUT)
        members = dist.new_group(ranks, timeout=OPERATION_TIMEOUT)
        if self.rank < n:
            assert isinstance(hosts, dist.ProcessGroup), "this rank is a member"
            assert isinstance(members, dist.ProcessGroup), "this rank is a member"
            self._host_groups[n], self._members[n] = hosts, members
            self._connect(members)

    def _make_rings(self, size: int) -> None:
        self._ring_sizes.add(size)
        for first in range(0, self.size - size + 1, size):
            ranks = list(range(first, first + size))
            try:
                ring = ring_group(ranks, OPERATION_TIMEOUT)
            except ValueError:  # this is the ring of other ranks
                continue
            self._rings[size] = ring
        if size in self._rings:
            self._connect(self._rings[size])

    def _make_strided(self, key: Strided) -> None:
        """Make the groups of `size` of the first `n` ranks that are `stride` apart; a group may lack its last ranks."""
        n, size, stride = key
        self._strided[key] = None
        for first in range(0, n, size * stride):
            for rank in range(first, min(n, first + stride)):
                ranks = list(range(rank, min(n, first + size * stride), stride))
                group = dist.new_group(ranks, timeout=OPERATION_TIMEOUT)
                if self.rank in ranks and len(ranks) > 1:
                    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
                    self._strided[key] = group
        if (own := self._strided[key]) is not None:
            self._connect(own)

    def _connect(self, group: dist.ProcessGroup) -> None:
        """Make NCCL's connections, for collectives and to the neighbours, so that no trial's time includes them."""
        if self._device.type == "cuda" and group.size() > 1:
            sent, received = (torch.zeros(1, device=self._device) for _ in range(2))
            dist.all_reduce(sent, group=group)
            Ring(group).pass_on(sent, received).wait()
            torch.cuda.synchronize(self._device)


class DistributedRankGroup:
    """The first ranks, which run a trial together."""

    def __init__(
        self,
        rank: int,
        size: int,
        host_group: dist.ProcessGroup,
        members: dist.ProcessGroup,
        rings: dict[int, dist.ProcessGroup],
        device: torch.device,
        strided: dict[Strided, dist.ProcessGroup | None],
    ) -> None:
        self.rank, self.size = rank, size
        self._strided = strided
        self.members: dist.ProcessGroup | None = members
        self._host_group = host_group
        self._rings = rings
        self._device = device

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """Return the largest of each value over the ranks."""
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._host_group)
        return tuple(shared.tolist())

    def context_parallel(self, size: int, layout: str) -> ContextParallel:
        """Return the ring of this rank. Ranks 0 to size - 1 form the first ring, the next ranks the second."""
        return ContextParallel(self._rings[size], layout)

    def strided(self, size: int, stride: int) -> dist.ProcessGroup | None:
        """Return the group of this rank; None if the rank is alone."""
        return None if size == 1 else self._strided[self.size, size, stride]

    def barrier(self, component: Component) -> Barrier | None:
        """Return the barrier of the ring, or of all ranks if all communicate; None without communication."""
        is_for_all = component.kind in {ComponentKind.COMMUNICATION, ComponentKind.EXCHANGE}
        if is_for_all or component.expert_parallel_size > 1:
            group = self.members
        elif component.communicates:
            group = self._rings[component.context_parallel_size]
        else:
            return None
        token = torch.zeros(1, device=self._device)

        def barrier() -> None:
            dist.all_reduce(token, group=group)  # NCCL: the stream waits, not the host

        return barrier


def serve_rank(rank: int, devices: Sequence[str], port: int) -> int:
    """Answer commands until the group is ended from outside; return an exit status if the device cannot be used.

    A rank goes on waiting for commands after a failed trial. The other ranks may wait for it in the middle of an
    operation that it cannot join again. The coordinator's parent then ends the whole group.
    """
    message_queue = MessageQueue(join_store(port))

    def send(message: Frozen) -> None:
        message_queue.reply(rank, message)

    device = torch.device(devices[rank])
    used_before = used_bytes(device) if device.type == "cuda" else None
    try:
        instruments = open_instruments(devices[rank], num_ranks=devices.count(devices[rank]))
        groups = _open_groups(rank, len(devices), device, port)
    except DeviceRefusedError as error:
        send(Refused(reason=str(error)))
        return 1
    gpu = open_gpu(devices[rank], read_settings().environment)
    if gpu is not None:
        # Only clocks and temperature, because connections to other ranks take memory that looks like another process's.
        instruments.monitor = DeviceMonitor(gpu)
    freeze_imports()
    session = Session(instruments, used_before, send, groups.rank_group)
    device_name, versions = identify(device)
    send(Hello(pid=os.getpid(), device_name=device_name, versions=versions))
    while True:
        command = message_queue.next_command(rank)
        if isinstance(command, RunTrial):
            groups.prepare(command.task)
            if not groups.takes_part(command.task):
                continue
        session.answer(command)


def _open_groups(rank: int, size: int, device: torch.device, port: int) -> ProcessGroups:
    try:
        return ProcessGroups(PrefixStore("groups", join_store(port)), rank, size, device)
    except RuntimeError as error:
        raise DeviceRefusedError(f"{device} cannot be used: {str(error).splitlines()[0]}") from error
