"""The passes of a block of the reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from bexp.explorer.cost_model.components import BlockRecompute
from bexp.measure.passes import ModulePasses
from bexp.workers.targets.reference.block import ResidualBlock


class BlockPasses(ModulePasses):
    """A block with its inputs, of which those in floating point are hidden states.

    The output of a residual block is shaped like its input, so that most such blocks can run in a row. Within the
    context of `waiting`, `meet_waiting` is called in place of `meet`.
    """

    def __init__(
        self,
        block: nn.Module,
        inputs: tuple[Tensor, ...],
        *,
        training: bool,
        gradient_dtype: torch.dtype,
        meet: Callable[[], None] | None = None,
        meet_waiting: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            block,
            tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs),
            training=training,
            gradient_dtype=gradient_dtype,
            chained=0 if isinstance(block, ResidualBlock) and block.is_repeatable else None,
            meet=meet,
        )
        self._meet_waiting = meet_waiting

    def waiting(self) -> AbstractContextManager[None] | None:
        """The context in which the host waits as the block says; null if it never does."""
        block = self.module
        if not isinstance(block, ResidualBlock) or block.waiting is None:
            return None
        return self._run_waiting(block.waiting())

    @contextmanager
    def _run_waiting(self, waiting: AbstractContextManager[None]) -> Iterator[None]:
        alone, self._meet = self._meet, self._meet_waiting
        try:
            with waiting:
                yield
        finally:
            self._meet = alone

    @contextmanager
    def without_recomputation(self) -> Iterator[None]:
        """The block without recomputation of the whole of it; its tiles and its single operations keep theirs."""
        block = self.module
        if not isinstance(block, ResidualBlock) or not block.recompute.is_whole:
            yield
            return
        asked, block.recompute = block.recompute, BlockRecompute.NONE
        try:
            yield
        finally:
            block.recompute = asked
