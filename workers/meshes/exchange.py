"""The measurement of an operation between devices of a mesh: all groups of a kind run it at the same time.

Such operations carry activations and gradients that ranks gather or reduce, micro-batches from stage to stage, and
tokens or weights between the ranks of experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bexp.explorer.cost.components import Component, ExchangeSpec, Operation
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.meshes.tensor_parallel import SequenceParallel

ITEM_BYTES = 2


class _MeshOperation:
    """One operation on buffers of bfloat16. A timer treats it as the forward of a block."""

    training = False
    is_chainable = True

    def __init__(
        self,
        asked: ExchangeSpec,
        group: dist.ProcessGroup | None,
        barrier: Callable[[], None],
        generator: torch.Generator,
        device: torch.device,
    ) -> None:
        self._operation, self._group, self._barrier = asked.operation, group, barrier
        if group is None:
            return
        ranks, own = group.size(), group.rank()
        share = max(1, asked.num_bytes // (ITEM_BYTES * ranks))

        def draw(numbers: int) -> Tensor:
            empty = torch.empty(numbers, dtype=torch.bfloat16, device=device)
            return empty.normal_(0.0, 1e-3, generator=generator)

        self._neighbours = (own - 1) % ranks, (own + 1) % ranks
        self._turns: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
        self._sent: list[int] | None = None
        self._received: list[int] | None = None
        if asked.operation is Operation.ALL_TO_ALL:
            smaller = max(1, share // 2)
            self._sent = [share, *(smaller for _ in range(ranks - 1))]
            self._received = [share if own == 0 else smaller] * ranks
            self._own, self._whole = draw(sum(self._sent)), draw(sum(self._received))
        elif asked.operation in {Operation.SEND, Operation.BROADCAST}:
            self._own, self._whole = draw(share * ranks), draw(share * ranks)
        else:  # by the code of blocks that ranks share, because the host's time counts too
            shared, gathers = SequenceParallel(group), asked.operation is Operation.ALL_GATHER
            self._turns = (shared.gather, shared.reduce) if gathers else (shared.reduce, shared.gather)
            length = share if gathers else share * ranks
            self._own = draw(length).view(1, length, 1).requires_grad_()

    def prepare_forward(self) -> None:
        """Wait until all ranks are here."""
        self._barrier()

    def forward(self) -> None:
        """Run the operation, unless the rank has no group."""
        if self._group is None:
            return
        if self._turns is not None:
            self._turns[0](self._own)
        elif self._operation is Operation.ALL_TO_ALL:
            dist.all_to_all_single(self._whole, self._own, self._received, self._sent, group=self._group)
        elif self._operation is Operation.BROADCAST:
            dist.broadcast(self._own, group=self._group, group_src=0)
        else:
            before, after = self._neighbours
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._own, group=self._group, group_peer=after),
                    dist.P2POp(dist.irecv, self._whole, group=self._group, group_peer=before),
                ]
            ):
                work.wait()

    def prepare_backward(self) -> None:
        """Do nothing, because the operation has no backward."""

    def backward(self) -> None:
        """Do nothing, because the operation has no backward."""

    def run_chain(self, length: int) -> None:
        """Run `length` operations in a row.

        Blocks gather and reduce in turns, and do the same in backward, where the host needs longer.
        """
        if self._group is None:
            return
        if self._turns is None:
            for _ in range(length):
                self.forward()
            return
        (first, second), x = self._turns, self._own
        for _ in range(length // 4):
            x = second(first(x))
        torch.autograd.backward(x, self._own.detach())


def measure_exchange(
    instruments: Instruments, component: Component, seed: int, clock: PhaseClock
) -> ComponentMeasurement:
    """Measure an operation of a mesh. All ranks must call this at the same time."""
    asked, ranks = component.exchange, instruments.rank_group
    assert asked is not None, "the component says what its operation is"
    barrier = ranks.barrier(component)
    assert barrier is not None, "all ranks take part"
    with clock.phase("build"):
        operation = _MeshOperation(
            asked, ranks.strided(asked.size, asked.stride), barrier, instruments.generator(seed), instruments.device
        )
    with clock.phase("warm_up"):
        instruments.timer.warm_up(operation)
    with clock.phase("timed"), instruments.monitor.watch() as watch:
        timing = instruments.timer.time(operation, watch.poll)
    return ComponentMeasurement(
        component=component,
        device_seconds=timing.device_seconds,
        host_seconds=timing.host_seconds,
        forward_device_seconds=timing.forward_device_seconds,
        standard_error_seconds=timing.standard_error_seconds,
        repeats=timing.repeats,
        saved_bytes=0,
        forward_peak_bytes=0,
        backward_peak_bytes=0,
        conditions=watch.conditions(),
    )
