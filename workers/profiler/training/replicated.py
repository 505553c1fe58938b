"""Training state that every process has whole; gradients are all-reduced."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workers.profiler.training.data_parallel import Step
from workers.targets.reference.optimizer import TrainingOptimizer

WATCHDOG_SECONDS = 0.3
"""NCCL's process groups look ten times a second at what has ended."""


class Replicated:
    """torch's DistributedDataParallel: gradients live in its buckets, which are reduced in the last micro-step."""

    def __init__(self, members: dist.ProcessGroup) -> None:
        self._members = members
        self._model: DistributedDataParallel | None = None

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """It stays as it is."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as one of its replicas; they are equal already, but for the positions of the tokens they take."""
        with warnings.catch_warnings():
            # Deprecated in torch 2.13, though its successor would still have buffers made equal at first.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self._model = DistributedDataParallel(
                model,
                process_group=self._members,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        return self._model

    def prepare(self, optimizer: TrainingOptimizer, micro_step: Step) -> None:
        """Exchange twice, since the first backward tells the order in which the buckets are built anew.

        Gradients are dropped before each, so that none is ever in an old bucket, or in none, and in a new one. The old
        buckets are no part of a step.
        """
        for _ in range(2):
            for parameter in optimizer.parameters:
                parameter.grad = None
            micro_step()
        self._let_go()

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Keep gradients to this process in all but the last."""
        assert self._model is not None
        context: AbstractContextManager[None] = nullcontext() if is_last else self._model.no_sync()
        return context

    def finish(self) -> None:
        """Free the buckets."""
        self._let_go()

    def _let_go(self) -> None:
        """NCCL's process group holds what it has reduced, since nobody waits for the reduction of a bucket as such.

        It lets go of it when a collective begins after its watchdog has seen that it has ended.
        """
        if dist.get_backend(self._members) == "nccl":
            time.sleep(WATCHDOG_SECONDS)
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self._members)


class ReplicatedMain:
    """Gradients in a format of their own, which DistributedDataParallel does not know of.

    In the last micro-step each is reduced as soon as the backward has added to it, while the backward goes on.
    """

    def __init__(self, members: dist.ProcessGroup) -> None:
        self._members = members
        self._reduces = False
        self._works: list[Any] = []
        self._reduced: list[Tensor] = []

    def take(self, unit: nn.Module, *, is_last: bool) -> None:
        """It stays as it is."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model."""
        return model

    def prepare(self, optimizer: TrainingOptimizer, micro_step: Step) -> None:
        """Follow each gradient's accumulation."""
        for parameter, gradient in zip(optimizer.parameters, optimizer.gradients, strict=True):
            assert gradient is not None, "gradients in a format of their own exist from the start"
            parameter.register_post_accumulate_grad_hook(self._follow(gradient))

    @contextmanager
    def micro_step(self, *, is_last: bool) -> Iterator[None]:
        """Reduce in the last one; it ends when all gradients are reduced."""
        self._reduces = is_last
        yield
        for work in self._works:
            work.wait()
        if self._reduced:
            torch._foreach_div_(self._reduced, float(self._members.size()))
        self._works, self._reduced = [], []

    def finish(self) -> None:
        """There is nothing: each reduction was waited for."""

    def _follow(self, gradient: Tensor) -> Callable[[Tensor], None]:
        def reduce(_: Tensor) -> None:
            if self._reduces:
                self._works.append(dist.all_reduce(gradient, group=self._members, async_op=True))
                self._reduced.append(gradient)

        return reduce
