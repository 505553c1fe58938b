"""All-to-all exchanges of rows that run beside computation, forward and backward.

An exchange has two nodes in the autograd graph: `RowExchange.start` begins it, and `RowExchange.finish` waits for it.
Backward passes them in the reverse order: the gradient of `finish` begins the reverse exchange, and the gradient of
`start` waits for it. Autograd runs the nodes that are ready in the reverse order of their creation, so that whatever
forward computes between `start` and `finish` runs beside the exchange in backward as well. All ranks create the nodes
in the same order, and so make their collective calls in the same order in both passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@dataclass(slots=True)
class Pending:
    """Collective operations in progress.

    It holds references to their buffers, so that the allocator cannot give them to kernels of the current stream
    before that stream waits.
    """

    works: list[dist.Work] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)

    def add(self, work: dist.Work | None, *buffers: Tensor) -> None:
        """Add an operation with the buffers that it reads and writes."""
        assert work is not None, "an asynchronous operation of a group that this rank is in"
        self.works.append(work)
        self.buffers.extend(buffers)

    def wait(self) -> None:
        """Make the current stream wait for all of them. The host waits only if the device is a CPU."""
        for work in self.works:
            work.wait()
        self.works, self.buffers = [], []


class Splits(NamedTuple):
    """Rows of a tensor, in the order of ranks: `sent[r]` go to rank r of the group and `received[r]` come from it."""

    sent: list[int]
    received: list[int]

    @property
    def back(self) -> Splits:
        """Those of the way back."""
        return Splits(self.received, self.sent)


class RowExchange:
    """All-to-all exchanges of tensors that travel together, each with its own splits.

    Both `start` and `finish` are called once, in this order, and all ranks of the group do so in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, *splits: Splits) -> None:
        self._group = group
        self._splits = splits
        self._pending = Pending()
        self._gradients: tuple[Tensor, ...] = ()

    def start(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Begin to send contiguous tensors (sum(sent), ...), and return their buffers (sum(received), ...).

        The buffers hold nothing before `finish`.
        """
        found: tuple[Tensor, ...] = _Start.apply(self, *tensors)  # type: ignore[no-untyped-call]  # untyped in torch
        return found

    def finish(self, buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Wait for the exchange and return the buffers, which now hold what has arrived."""
        found: tuple[Tensor, ...] = _Finish.apply(self, *buffers)  # type: ignore[no-untyped-call]  # untyped in torch
        return found

    def launch(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Begin the exchange without a trace in the autograd graph and return its buffers."""
        return self._launch(tensors, self._splits)

    def wait(self) -> None:
        """Wait for the exchange in progress."""
        self._pending.wait()

    def return_gradients(self, grads: tuple[Tensor, ...]) -> None:
        """Begin the reverse exchange."""
        self._gradients = self._launch(grads, tuple(each.back for each in self._splits))

    def take_gradients(self) -> tuple[Tensor, ...]:
        """Wait for the reverse exchange and return what has arrived."""
        self._pending.wait()
        found, self._gradients = self._gradients, ()
        return found

    def _launch(self, tensors: tuple[Tensor, ...], splits: tuple[Splits, ...]) -> tuple[Tensor, ...]:
        buffers = []
        for tensor, (sent, received) in zip(tensors, splits, strict=True):
            buffers.append(buffer := tensor.new_empty(sum(received), *tensor.shape[1:]))
            work = dist.all_to_all_single(buffer, tensor, received, sent, group=self._group, async_op=True)
            self._pending.add(work, tensor, buffer)
        return tuple(buffers)


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.launch(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.exchange.take_gradients()


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, *buffers: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        exchange.wait()
        return buffers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.return_gradients(tuple(grad.contiguous() for grad in grads))
        return None, *grads  # autograd wants gradients in the shape of the buffers; `_Start` takes those that arrive
