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
        """Start to send `sent` to the successor and to fill `received` from the predecessor; both contiguous.

        Every rank must call it in the same order. On CUDA the exchange starts when the current stream has come to
        here, and runs on a stream of the group's own beside what is launched afterwards.
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
    """An exchange under way.

    It holds both buffers: as long as it does, the allocator gives neither to a kernel of the current stream, which
    knows nothing of the group's. Once that stream waits for the exchange, its own order keeps them apart.
    """

    works: list[dist.Work]
    buffers: tuple[Tensor, ...]

    def wait(self) -> None:
        """What the current stream does from here on comes after the exchange; the host waits only without CUDA."""
        for work in self.works:
            work.wait()
        self.works, self.buffers = [], ()


def ring_group(ranks: list[int] | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A process group of these ranks (all by default) for context parallelism; every rank must call it.

    An operation that takes longer than `timeout` (default: the back end's own) ends the process.

    NCCL's kernels get a stream of high priority: an exchange and an attention kernel that become ready together then
    run together, where otherwise the exchange waits for multiprocessors until attention's last wave.
    """
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout  # torch warns where the two differ
    group = dist.new_group(ranks, timeout=timeout, pg_options=options)
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is none of the group's")  # noqa: TRY004 - of the caller's, not a type
    return group
