"""The processes that run a trial together, as one of them sees them."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.measure.timing import Reducer
from explorer.cost_model.components import Component
from explorer.records.trial import TrialPlan
from workers.profiler.failures import UnsupportedTrialError


class Barrier(Protocol):
    """Keeps what comes next on this process's device from starting before every process has come to it."""

    def __call__(self) -> None: ...  # noqa: D102 - its protocol says it


class RankGroup(Reducer, Protocol):
    """Every member must call the same methods in the same order.

    A member that fails does not come back to the others: they wait for it until all are ended from outside.
    """

    size: int
    rank: int
    members: dist.ProcessGroup | None
    """All of them; null for one alone."""

    def context_parallel(self, size: int, layout: str) -> ContextParallel:
        """The ring of `size` members that this one shares its sequences with."""

    def barrier(self, component: Component) -> Barrier | None:
        """Of the members that run the component together; null for one that each runs by itself."""


class Alone:
    """A ranks of one."""

    size = 1
    rank = 0
    members: dist.ProcessGroup | None = None

    def all_reduce_max(self, *values: float) -> tuple[float, ...]:
        """The values."""
        return values

    def context_parallel(self, size: int, layout: str) -> ContextParallel:
        """There is no ring."""
        raise AssertionError("a process alone shares no sequences")

    def barrier(self, component: Component) -> Barrier | None:
        """Nobody to wait for."""
        assert not component.is_joint, "a process alone runs nothing that communicates"
        return None


ALONE = Alone()


def alone(plan: TrialPlan) -> RankGroup:
    """The ranks of a process that has no other; UnsupportedTrialError if the trial needs more."""
    check_size(plan, 1)
    return ALONE


def check_size(plan: TrialPlan, num_processes: int) -> None:
    """UnsupportedTrialError unless so many processes can run the trial."""
    if plan.num_processes > num_processes:
        raise UnsupportedTrialError(f"the trial needs {plan.num_processes} devices; the profiler has {num_processes}")
