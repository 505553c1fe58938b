"""What a request does with its devices: who shares a sequence, and how many of them a worker must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bexp.explorer.dimensions.micro_batch_size import divisors
from bexp.explorer.request.device_rules import find_sharing_problem

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


@dataclass(frozen=True, slots=True)
class RequestedDevices:
    """The devices of a request: data-parallel groups of c devices that share sequences, or meshes."""

    asked: ExplorationRequest

    @property
    def is_mesh(self) -> bool:
        """Whether they form meshes."""
        return self.asked.num_devices > 1 and self.asked.parallelism.needs_mesh

    @property
    def context_parallel_sizes(self) -> tuple[int, ...]:
        """How many devices may share a sequence, ascending."""
        sizes = self.asked.context_parallel.sizes
        if sizes == "explore":
            every = divisors(self.asked.num_devices)
            return tuple(size for size in every if find_sharing_problem(self.asked, size) is None)
        return tuple(sorted(set(sizes)))

    def needed(self, available: int | None = None) -> int:
        """Return how many devices a worker must have to explore this.

        It needs the largest of the listed context-parallel sizes. With `explore` it needs two devices that can share a
        sequence, or as many as it began with, which `available` says, so that a resumed exploration finds the same.
        An exploration that began with all its devices needs them all, because what they exchange is part of what it
        learns. So does one that chooses a level of sharding, because the levels differ by what they exchange.
        """
        every = self.asked.num_devices
        if self.is_mesh or len(self.asked.space.sharding_choices) > 1:
            return every
        if available is not None and self.asked.mode == "train" and available >= every:
            return every
        sizes = self.context_parallel_sizes
        if self.asked.context_parallel.sizes != "explore":
            return max(sizes)
        if available is None:
            return next((size for size in sizes if size > 1), 1)
        return max((size for size in sizes if size <= available), default=1)

    @property
    def optimizer_shards(self) -> int:
        """Number of devices that share one optimizer step.

        Training state is sharded over all devices. This includes devices that share sequences, because their gradients
        are reduced together anyway.
        """
        return self.asked.num_devices if self.asked.training.sharding.level >= 1 else 1

    @property
    def batch_share(self) -> float:
        """One device's share of the effective batch, as a real number of whole sequences.

        It is the same for every context-parallel size, because c devices that share sequences process c times as many.
        """
        return self.asked.effective_batch_size / self.asked.num_devices

    def data_parallel_size(self, context_parallel_size: int) -> int:
        """Number of groups of devices that process sequences of their own."""
        return self.asked.num_devices // context_parallel_size
