"""The ranks that share the experts of a layer, seen from one of them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Splits(NamedTuple):
    """Rows of a tensor, in the order of ranks: `sent[r]` go to rank r of the group and `received[r]` come from it."""

    sent: list[int]
    received: list[int]

    @property
    def back(self) -> Splits:
        """Those of the way back."""
        return Splits(self.received, self.sent)


class Peers(Protocol):
    """What `ExpertParallel` asks of its group. Each operation begins; its work says when it ends.

    A None work says that the current stream already has the operation.
    """

    size: int
    rank: int

    def all_to_all(self, buffer: Tensor, tensor: Tensor, splits: Splits) -> dist.Work | None:
        """Begin to send the rows of a contiguous tensor, and to receive those of `buffer`."""

    def broadcast(self, part: Tensor, owner: int) -> dist.Work | None:
        """Begin to copy the owner's tensor to all ranks, in place."""

    def reduce(self, part: Tensor, owner: int) -> dist.Work | None:
        """Begin to sum the tensors of all ranks at the owner, in place."""

    def all_to_all_counts(self, sent: Tensor) -> Tensor:
        """Return what each rank sends here (N, ...), given what goes to each of them (N, ...)."""

    def read(self, counts: Tensor) -> list[int]:
        """Return numbers (P,) of the device to the host, which waits for them."""


class GroupPeers:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.rank = group.size(), group.rank()

    def all_to_all(self, buffer: Tensor, tensor: Tensor, splits: Splits) -> dist.Work | None:
        """Begin an all-to-all with uneven splits."""
        work: dist.Work | None = dist.all_to_all_single(
            buffer, tensor, splits.received, splits.sent, group=self._group, async_op=True
        )
        return work

    def broadcast(self, part: Tensor, owner: int) -> dist.Work | None:
        """Begin a broadcast."""
        work: dist.Work | None = dist.broadcast(part, group=self._group, group_src=owner, async_op=True)
        return work

    def reduce(self, part: Tensor, owner: int) -> dist.Work | None:
        """Begin a sum at the owner."""
        work: dist.Work | None = dist.reduce(part, group=self._group, group_dst=owner, async_op=True)
        return work

    def all_to_all_counts(self, sent: Tensor) -> Tensor:
        """An all-to-all of equal parts; the current stream waits for them."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def read(self, counts: Tensor) -> list[int]:
        """Wait for the device, once."""
        numbers: list[int] = counts.tolist()
        return numbers
