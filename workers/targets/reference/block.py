"""The base of every block of a layer: a residual branch, tiles, recomputation, compilation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from bexp.explorer.cost.components import BlockRecompute
from bexp.kernels.recomputation import recomputed
from bexp.kernels.selective_recompute import selective_recompute
from bexp.kernels.tiling import tiled

P = ParamSpec("P")
R = TypeVar("R")

_RECOMPILE_LIMIT = 1 << 12


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` under torch.compile with static shapes.

    A profile compiles the same code for many shapes. torch's limit of a few is lifted, because beyond it code silently
    runs eagerly. DistributedDataParallel's splitting of graphs is off, because code is compiled in small parts.
    """
    import torch._dynamo.config as dynamo  # noqa: PLC0415 - takes seconds, and eager runs do not need it

    dynamo.recompile_limit = max(dynamo.recompile_limit, _RECOMPILE_LIMIT)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, _RECOMPILE_LIMIT)
    dynamo.optimize_ddp = False
    return torch.compile(function, dynamic=False)


def left_eager(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, kept out of the graph of a compiled caller."""
    wrapped: Callable[P, R] = torch.compiler.disable(function)
    return wrapped


class ResidualBlock(nn.Module, ABC):
    """`x + core(x)` for hidden states x (B, S, D).

    `core` is the branch as a function of one tile. `branch` runs it with the block's tiling, and `residual` adds x.
    `forward` moreover recomputes all of it in backward if the block says so. Recomputation by operation is part of the
    branch. In a tiled block it is without effect, because each tile is recomputed as a whole.
    """

    recompute_to_the_end: ClassVar[bool] = False
    """The layer continues after this block, so that a recomputation of the layer runs all of the block."""

    def __init__(self, *, recompute: BlockRecompute, training: bool, bta_tile: int | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.bta_tile = bta_tile
        self.norm: nn.Module
        self.reduce: nn.Module | None = None
        """Sums the branches of ranks that share the block; None for a whole block."""
        self.waiting: Callable[[], AbstractContextManager[None]] | None = None
        """The context in which the host waits for the device in forward, as in training; None if it never waits."""
        self.is_repeatable = True
        """The block can run on its own output as well."""
        self._compiled_core: Callable[[Tensor], Tensor] | None = None
        self._compiled_sum: Callable[[Tensor], Tensor] | None = None
        self.train(training)

    @abstractmethod
    def core(self, x_BSD: Tensor) -> Tensor:
        """Return the residual branch of one tile, its norm included."""

    def branch(self, x_BSD: Tensor) -> Tensor:
        """Return the residual branch, tiled."""
        return self._tiled(self._compiled_core or self._branch, x_BSD)

    def residual(self, x_BSD: Tensor) -> Tensor:
        """Return `x + branch(x)`, tiled, never recomputed as a whole."""
        return self._tiled(self._compiled_sum or self._sum, x_BSD)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return `x + branch(x)`."""
        if self.recompute.is_whole and self.training:
            to_the_end = self.recompute_to_the_end or self.recompute is BlockRecompute.TO_THE_END
            return recomputed(self.residual, x_BSD, early_stop=not to_the_end)
        return self.residual(x_BSD)

    def compile_core(self) -> None:
        """Compile the code of a tile. Tiling and recomputation stay outside, so that no graph grows with the batch.

        Recomputation by operation could not stay outside, because the compiler fuses the operations.
        """
        assert not self.recompute.by_operation, "the request refuses it"
        self._compiled_core = compiled(self.core)
        self._compiled_sum = compiled(self._sum)

    def _branch(self, x_BSD: Tensor) -> Tensor:
        out = self.core(x_BSD)
        return out if self.reduce is None else cast(Tensor, self.reduce(out))

    def _sum(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self._branch(x_BSD)

    def _tiled(self, function: Callable[[Tensor], Tensor], x_BSD: Tensor) -> Tensor:
        if self.recompute.by_operation and self.bta_tile is None and self.training and torch.is_grad_enabled():
            with selective_recompute(products=self.recompute is BlockRecompute.PROJECTIONS):
                return function(x_BSD)
        return tiled(function, x_BSD, self.bta_tile, keep_inputs_only=self.training)
