"""The interface of meshes to the profiler. Only `bexp.workers.targets.extensions` names this module.

It measures the part of a block that one device has, whole models, and operations between devices. Those carry
activations and gradients that ranks gather or reduce, micro-batches from stage to stage, and tokens or weights between
the ranks of experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bexp.explorer.cost.components import Component, ComponentKind, ExchangeSpec, Operation
from bexp.explorer.meshes.mesh import MeshRun
from bexp.explorer.meshes.shards import SPREAD_EXPERTS, is_shard, shard_of
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.records.measurement import ComponentMeasurement, WholeModelMeasurement
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.timing import standard_error
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.meshes.spread_experts import build_busiest_rank
from bexp.workers.meshes.tensor_parallel import SequenceParallel, VocabularyEmbedding, spread_loss_alone
from bexp.workers.meshes.training_run import MeshTrainingRun
from bexp.workers.profiler.trials.whole_model import run_steps
from bexp.workers.targets.reference.attention_block import AttentionBlock
from bexp.workers.targets.reference.factory import build_block
from bexp.workers.targets.reference.head import Embedding, Head
from bexp.workers.targets.reference.norm import norm_over_ranks, total_alone

__all__ = ["build_shard", "measure_exchange", "run_whole_model", "serves", "shard_of"]


def serves(subject: Component | TrialTask) -> bool:
    """Return whether a component is a shard or an exchange, or a task is a whole model on a mesh."""
    if isinstance(subject, Component):
        return subject.kind is ComponentKind.EXCHANGE or is_shard(subject)
    return isinstance(subject.shared_run, MeshRun)


def build_shard(
    model: ModelSpec,
    component: Component,
    request: ExplorationRequest,
    device: torch.device,
    *,
    generator: torch.Generator | None = None,
    w_tied: nn.Parameter | None = None,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Return the part of a block that one device runs without the others. `model` is that of `shard_of`.

    Where several devices share experts, the part is that of the busiest device. Within the context of its `waiting`, it
    is the block of this rank of `group`.
    """
    size = component.tensor_parallel_size
    if component.part == SPREAD_EXPERTS:
        experts, _ = build_busiest_rank(model, component, request, device, generator, group)
        return experts
    whole = component.model_copy(update={"tensor_parallel_size": 1, "part": None})
    block = build_block(model, whole, request, device, generator=generator, w_tied=w_tied)
    if size == 1:
        return block
    if isinstance(block, Embedding):
        return VocabularyEmbedding(block, (0, model.vocab_size), None)
    if isinstance(block, AttentionBlock) and model.qk_norm == "full":
        block.norm_over_ranks = partial(norm_over_ranks, size=size, total=total_alone)
    if isinstance(block, Head):
        spread_loss_alone(block)
    return block


MAX_STEPS = 30
"""The most steps of several ranks, which vary more, because each rank has a host process of its own."""


def run_whole_model(
    instruments: Instruments, task: TrialTask, request: ExplorationRequest, clock: PhaseClock
) -> WholeModelMeasurement:
    """Train a few steps of a model on all ranks of a mesh, back to back; the peak is that of this rank.

    Raises:
        UnsupportedTrialError: the model cannot be spread like this.
    """
    model, mesh_run = task.model, task.shared_run
    assert isinstance(model, ModelSpec), "meshes are for reference layers"
    assert isinstance(mesh_run, MeshRun), "the task says on which mesh"
    instruments.settle(release=True)
    run = run_steps(
        instruments,
        lambda: MeshTrainingRun(instruments, model, task.candidate, mesh_run, request),
        clock,
        most_steps=MAX_STEPS,
    )
    steps = [(before.seconds_until(updated), updated.seconds_until(end)) for before, updated, end in run.marks]
    number = mesh_run.num_micro_batches
    computed = [seconds / number for seconds, _ in steps]
    return WholeModelMeasurement(
        micro_step_seconds=statistics.median(computed),
        optimizer_seconds=statistics.median(seconds for _, seconds in steps),
        standard_error_seconds=standard_error(computed) if len(computed) > 1 else 0.0,
        peak_bytes=run.peak_bytes,
        reserved_bytes=run.reserved_bytes,
        repeats=len(steps),
        conditions=run.watch.conditions(),
        num_micro_batches=number,
    )


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
