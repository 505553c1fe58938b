"""Data parallelism: its interface, the choice of its way by the request, and the ways that do not shard."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bexp.explorer.model.training import Sharding
from bexp.graphs.graphed_loss import GraphedLoss
from bexp.workers.instruments.failures import UnsupportedTrialError

Step = Callable[[], None]

MICRO_STEPS = 2
DATA_PARALLEL_MICRO_STEPS = 3
"""The kinds of micro-steps: the first, the last, and one in between, which represents all others."""


class Stepped(Protocol):
    """An optimizer, as the all-reduce of gradients sees it."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the optimizer steps."""

    @property
    def gradients(self) -> Sequence[Tensor | None]:
        """The gradients that the optimizer reads, one for each parameter."""


@runtime_checkable
class SpreadBlock(Protocol):
    """A block some of whose parameters are spread over ranks, so that each rank has others."""

    @property
    def spread_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that other ranks do not have; none if every rank has the same."""


def spread_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a module's blocks that other ranks do not have."""
    blocks = (each for each in module.modules() if isinstance(each, SpreadBlock))
    return {parameter for block in blocks for parameter in block.spread_parameters}


class DataParallel(Protocol):
    """A way to train together: changes to a model as it is built, and to its gradients as it is trained.

    All processes have the same parameters and different data. After the last micro-step of a step, the optimizer has
    the mean of their gradients, or this process's share of that mean.
    """

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """Treat a layer, an embedding or a head that was just built. `is_last`: forward runs it last."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in place of the finished model."""

    def prepare(self, optimizer: Stepped, micro_step: Step) -> None:
        """Bring memory and the order of communication to their steady state.

        `micro_step` runs a micro-step, and may leave gradients.
        """

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and the backward of one micro-step of a step."""

    def finish(self) -> None:
        """Free memory that outlives the model, after all work of the device has ended."""


class SingleProcess:
    """One process that communicates nothing, or a model in eval mode."""

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """Leave the unit as it is."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model

    def prepare(self, optimizer: Stepped, micro_step: Step) -> None:
        """Do nothing."""

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def finish(self) -> None:
        """Do nothing."""


class LoneReplica(SingleProcess):
    """One process in place of several replicas: it has the memory of their buckets, and exchanges nothing."""

    def __init__(self) -> None:
        self._buckets: list[Tensor] = []

    def prepare(self, optimizer: Stepped, micro_step: Step) -> None:
        """Allocate what DistributedDataParallel's buckets take."""
        self._buckets = [torch.empty_like(parameter) for parameter in optimizer.parameters]

    def finish(self) -> None:
        """Free it."""
        self._buckets = []


def require_captured(loss: GraphedLoss) -> None:
    """Check that a micro-step that has run was captured.

    Raises:
        UnsupportedTrialError: it was not captured; the message says why.
        torch.OutOfMemoryError: memory ran out in the attempt.
    """
    if isinstance(loss.error, torch.OutOfMemoryError):
        raise loss.error
    if loss.problem is not None or not loss.num_captures:
        raise UnsupportedTrialError(f"the micro-step cannot be replayed as CUDA graphs: {loss.problem}")


def data_parallel(
    members: dist.ProcessGroup | None,
    device: torch.device,
    sharding: Sharding,
    parameter_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    *,
    drops_gradients: bool = False,
) -> DataParallel:
    """Return how the processes of `members` train together with this sharding; None if one process trains alone.

    `drops_gradients`: the optimizer frees gradients after a step, so that buckets cannot hold them from step to step.
    """
    if members is None:
        return SingleProcess()
    separate = gradient_dtype is not parameter_dtype
    if sharding is not Sharding.NONE:
        from bexp.workers.training.fully_sharded import FullySharded  # noqa: PLC0415 - takes half a second

        return FullySharded(members, device, sharding, gradient_dtype if separate else None)
    return ReplicatedMain(members) if separate else Replicated(members, keeps_gradients=not drops_gradients)


WATCHDOG_SECONDS = 0.3
"""NCCL's process groups check ten times a second which operations have ended."""


class Replicated:
    """torch's DistributedDataParallel, whose buckets are reduced in the last micro-step.

    With `keeps_gradients`, gradients live in the buckets. Otherwise the buckets hold copies of them, which is torch's
    default, and that of the trainers that wrap a model in it.
    """

    def __init__(self, members: dist.ProcessGroup, *, keeps_gradients: bool) -> None:
        self._members = members
        self._keeps_gradients = keeps_gradients
        self._model: DistributedDataParallel | None = None

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """Leave the unit as it is."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model as a replica. All replicas have equal parameters already."""
        with warnings.catch_warnings():
            # Deprecated in torch 2.13, but its successor would still broadcast buffers at first.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self._model = DistributedDataParallel(
                model,
                process_group=self._members,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=self._keeps_gradients,
            )
        return self._model

    def prepare(self, optimizer: Stepped, micro_step: Step) -> None:
        """Run two micro-steps, because torch builds the buckets again in the order of the first backward.

        Gradients are dropped before each, so that none is in an old bucket afterwards. The old buckets are no part of a
        step, and are freed.
        """
        for _ in range(2):
            for parameter in optimizer.parameters:
                parameter.grad = None
            micro_step()
        self._free_buckets()

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Reduce gradients only in the last micro-step."""
        assert self._model is not None
        context: AbstractContextManager[None] = nullcontext() if is_last else self._model.no_sync()
        return context

    def finish(self) -> None:
        """Free the buckets."""
        self._free_buckets()

    def _free_buckets(self) -> None:
        """Make NCCL's process group free the reduced buckets, which it holds because nobody waits for them.

        The group frees a bucket when a new collective begins after the watchdog has seen the end of the reduction.
        """
        if dist.get_backend(self._members) == "nccl":
            time.sleep(WATCHDOG_SECONDS)
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self._members)


class ReplicatedMain:
    """Main gradients in another dtype than the parameters, which DistributedDataParallel does not support.

    In the last micro-step, each gradient is reduced as soon as backward has added to it, while backward goes on.
    """

    def __init__(self, members: dist.ProcessGroup) -> None:
        self._members = members
        self._reduces = False
        self._works: list[Any] = []
        self._reduced: list[Tensor] = []

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """Leave the unit as it is."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model

    def prepare(self, optimizer: Stepped, micro_step: Step) -> None:
        """Reduce each gradient after its accumulation."""
        for parameter, gradient in zip(optimizer.parameters, optimizer.gradients, strict=True):
            assert gradient is not None, "main gradients exist from the start"
            parameter.register_post_accumulate_grad_hook(self._reduce_after(gradient))

    @contextmanager
    def micro_step(self, *, is_last: bool) -> Iterator[None]:
        """Reduce in the last micro-step, which ends when all gradients are reduced."""
        self._reduces = is_last
        yield
        for work in self._works:
            work.wait()
        if self._reduced:
            torch._foreach_div_(self._reduced, float(self._members.size()))
        self._works, self._reduced = [], []

    def finish(self) -> None:
        """Do nothing, because each reduction was waited for."""

    def _reduce_after(self, gradient: Tensor) -> Callable[[Tensor], None]:
        def reduce(_: Tensor) -> None:
            if self._reduces:
                self._works.append(dist.all_reduce(gradient, group=self._members, async_op=True))
                self._reduced.append(gradient)

        return reduce
