"""A ring of ranks that pass buffers to their successors while they compute."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


class Ring:
    """The ranks of a process group, each with a predecessor and a successor."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()

    def pass_on(self, sent: Tensor, received: Tensor, *, tag: int = 0) -> Passage:
        """Start sending `sent` to the successor and receiving `received` from the predecessor. Both are contiguous.

        All ranks must make these calls in the same order. On CUDA the passage starts when the current stream reaches
        this point, and runs on the group's own stream beside later launches.
        """
        successor, predecessor = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, tag=tag, group_peer=successor),
                dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=predecessor),
            ]
        )
        return Passage(works, (sent, received))


@dataclass(slots=True)
class Passage:
    """Buffers on their way from each rank to its successor.

    It holds references to both buffers, so that the allocator cannot give them to other kernels of the current stream,
    which is not ordered with the group's stream. Once the current stream waits for the passage, they are safe.
    """

    works: list[dist.Work]
    buffers: tuple[Tensor, ...]

    def wait(self) -> None:
        """Make the current stream wait for the passage. The host waits only if the device is a CPU."""
        for work in self.works:
            work.wait()
        self.works, self.buffers = [], ()


def ring_group(ranks: list[int] | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make a process group of these ranks (default: all) for context parallelism. All ranks must call it.

    An operation that takes longer than `timeout` (default: the back end's own) ends the process.

    NCCL's kernels get a stream of high priority. Otherwise a passage that becomes ready together with an attention
    kernel would wait for multiprocessors until the last wave of attention.
    """
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout  # torch warns where the two differ
    group = dist.new_group(ranks, timeout=timeout, pg_options=options)
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group")  # noqa: TRY004 - of the caller's, not a type
    return group
