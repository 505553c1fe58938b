"""The ranks that run a trial together, seen from one of them."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from bexp.explorer.cost.components import Component
from bexp.explorer.records.trial import TrialTask
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.measure.timing import Reducer
from bexp.workers.instruments.failures import UnsupportedTrialError


class Barrier(Protocol):
    """A point at which the device waits until all ranks of a component have reached it."""

    def __call__(self) -> None: ...  # noqa: D102 - its protocol says it


class RankGroup(Reducer, Protocol):
    """The ranks of a trial. Each of them must call the same methods in the same order.

    A rank that fails cannot join the others again. The others wait for it until all are ended from outside.
    """

    size: int
    rank: int
    members: dist.ProcessGroup | None
    """torch's group of all ranks; None for a single rank."""

    def context_parallel(self, size: int, layout: str) -> ContextParallel:
        """The ring of `size` ranks with which this rank shares its sequences."""

    def strided(self, size: int, stride: int) -> dist.ProcessGroup | None:
        """The group of this rank among those of `size` ranks that are `stride` apart; None for a single rank."""

    def barrier(self, component: Component) -> Barrier | None:
        """The barrier of the ranks that run the component together; None if each runs it without the others."""


class SingleRank:
    """A group of one rank."""

    size = 1
    rank = 0
    members: dist.ProcessGroup | None = None

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """Return the values."""
        return values

    def context_parallel(self, size: int, layout: str) -> ContextParallel:
        """Raise AssertionError, because a single rank has no ring."""
        raise AssertionError("a single rank shares no sequences")

    def strided(self, size: int, stride: int) -> dist.ProcessGroup | None:
        """Return None, because a single rank has no other."""
        assert size == 1, "a single rank"
        return None

    def barrier(self, component: Component) -> Barrier | None:
        """Return None, because a single rank waits for no other."""
        assert not component.is_joint, "a single rank runs nothing that communicates"
        return None


SINGLE_RANK = SingleRank()


def single_rank(task: TrialTask) -> RankGroup:
    """Return the group of a profiler with one device. Raises UnsupportedTrialError if the trial needs more."""
    check_size(task, 1)
    return SINGLE_RANK


def check_size(task: TrialTask, num_processes: int) -> None:
    """Raise UnsupportedTrialError if the trial needs more than `num_processes`."""
    if task.num_processes > num_processes:
        raise UnsupportedTrialError(f"the trial needs {task.num_processes} devices; the profiler has {num_processes}")
