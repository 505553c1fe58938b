"""All-to-all collectives of rows that run beside computation, forward and backward.

A collective has two nodes in the autograd graph: `RowAllToAll.start` begins it, and `RowAllToAll.finish` waits for it.
Backward passes them in the reverse order: the gradient of `finish` begins the reverse collective, and the gradient of
`start` waits for it. Autograd runs the nodes that are ready in the reverse order of their creation, so that whatever
forward computes between `start` and `finish` runs beside the collective in backward as well. All ranks create the nodes
in the same order, and so make their collective calls in the same order in both passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.expert_parallel.peers import Peers, Splits


class PendingCollective(ABC):
    """Collective operations that begin in one node of the autograd graph and end in another, in both directions.

    It holds references to the buffers of operations in progress, so that the allocator cannot give them to kernels of
    the current stream before that stream waits.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._works: list[dist.Work] = []
        self._buffers: list[Tensor] = []

    @abstractmethod
    def launch(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Begin the collective without a trace in the autograd graph, and return its buffers."""

    @abstractmethod
    def return_gradients(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Begin the reverse collective for the buffers' gradients, and return tensors of their shapes for the graph."""

    @abstractmethod
    def take_gradients(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients of what was sent, after the reverse collective; the graph hands over `grads`."""

    def wait(self) -> None:
        """Make the current stream wait for what is in progress. The host waits only if the device is a CPU."""
        for work in self._works:
            work.wait()
        self._works, self._buffers = [], []

    def _add(self, work: dist.Work | None, *buffers: Tensor) -> None:
        """Note an operation that has begun, with the buffers that it reads and writes; None if its stream is ours."""
        if work is not None:
            self._works.append(work)
            self._buffers.extend(buffers)

    def _start(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        buffers: tuple[Tensor, ...] = _Start.apply(self, *tensors)  # type: ignore[no-untyped-call]  # untyped in torch
        return buffers

    def finish(self, buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Wait for the collective and return the buffers, which now hold what has arrived."""
        filled: tuple[Tensor, ...] = _Finish.apply(self, *buffers)  # type: ignore[no-untyped-call]  # untyped in torch
        return filled


class RowAllToAll(PendingCollective):
    """All-to-all collectives of tensors that travel together, each with its own splits.

    Both `start` and `finish` are called once, in this order, and all ranks of the group do so in the same order.
    """

    def __init__(self, peers: Peers, *splits: Splits) -> None:
        super().__init__(peers)
        self._splits = splits
        self._gradients: tuple[Tensor, ...] = ()

    def start(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Begin to send contiguous tensors (sum(sent), ...), and return their buffers (sum(received), ...).

        The buffers hold nothing before `finish`.
        """
        return self._start(*tensors)

    def launch(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Begin to send, without a trace in the autograd graph."""
        return self._launch(tensors, self._splits)

    def return_gradients(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Begin to send the gradients back to where the rows came from."""
        back = tuple(each.back for each in self._splits)
        self._gradients = self._launch(tuple(grad.contiguous() for grad in grads), back)
        return grads  # autograd wants gradients in the shape of the buffers; `take_gradients` has those that arrive

    def take_gradients(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients that have arrived."""
        gradients, self._gradients = self._gradients, ()
        return gradients

    def _launch(self, tensors: tuple[Tensor, ...], splits: tuple[Splits, ...]) -> tuple[Tensor, ...]:
        buffers = []
        for tensor, each in zip(tensors, splits, strict=True):
            buffers.append(buffer := tensor.new_empty(sum(each.received), *tensor.shape[1:]))
            self._add(self._peers.all_to_all(buffer, tensor, each), tensor, buffer)
        return tuple(buffers)


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, collective: PendingCollective, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.collective = collective
        return collective.launch(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.collective.wait()
        return None, *ctx.collective.take_gradients(grads)


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, collective: PendingCollective, *buffers: Tensor) -> tuple[Tensor, ...]:
        ctx.collective = collective
        collective.wait()
        return buffers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.collective.return_gradients(grads)
