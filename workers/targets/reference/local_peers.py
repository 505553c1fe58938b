"""Ranks that share experts, played by one device: everything of a layer but what passes the links."""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.kernels.expert_parallel.peers import Splits


class LocalPeers:
    """One of `size` ranks that have equal routes, without the others. Exchanges are copies on its own device.

    What comes from another rank is what this rank sends to itself, so that its experts get as many rows, with the same
    routes, as in a group whose ranks have such tokens. A copy takes a fraction of an exchange's time; whoever adds the
    exchange can take it off again, because `bexp.explorer.cost.expert_overlap` knows its bytes.

    The host reads counts once, and knows them afterwards, because routes stay the same. It then runs ahead of the
    device, so that the seconds of both can be measured.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self._known: list[int] | None = None
        self._drawn: dict[tuple[int, ...], Tensor] = {}

    def all_to_all(self, buffer: Tensor, tensor: Tensor, splits: Splits) -> None:
        """Fill the buffer with what this rank sends to itself; on the way back, with what it sends to anyone."""
        own = splits.sent[self.rank]
        if all(number == own for number in splits.received):
            first = sum(splits.sent[: self.rank])
            tensor = tensor[first : first + own]
        _fill(buffer, tensor)

    def broadcast(self, part: Tensor, owner: int) -> None:
        """Fill another rank's tensor with numbers of the size of weights."""
        if owner == self.rank:
            return
        shape = tuple(part.shape[1:])
        if shape not in self._drawn:
            self._drawn[shape] = torch.randn(shape, dtype=part.dtype, device=part.device) * 0.02
        part.copy_(self._drawn[shape])

    def reduce(self, part: Tensor, owner: int) -> None:
        """Leave the tensor as it is: its sum passes the links alone."""

    def all_to_all_counts(self, sent: Tensor) -> Tensor:
        """Return what this rank sends to itself as that of every rank."""
        return sent[self.rank].expand_as(sent).contiguous()

    def read(self, counts: Tensor) -> list[int]:
        """Return the numbers; the host waits for them the first time."""
        if self._known is None:
            self._known = counts.tolist()
        return self._known


def _fill(buffer: Tensor, rows: Tensor) -> None:
    """Copy the rows into the buffer, again and again until it is full."""
    number, wanted = rows.shape[0], buffer.shape[0]
    if not number:
        buffer.zero_()
        return
    times, rest = divmod(wanted, number)
    if times:
        buffer[: times * number].view(times, *rows.shape).copy_(rows.expand(times, *rows.shape))
    if rest:
        buffer[times * number :].copy_(rows[:rest])
