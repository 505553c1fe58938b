"""Rows that are copies of tokens, and sums of rows into tokens, where tokens differ in how many rows they have.

Both directions use indices and no atomics, so results are reproducible. Sums are accumulated in float32, or in the
rows' dtype if that is wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.selective_recompute import announce
from bexp.kernels.triton_support import triton_reason

FLOAT32_SUMS = {torch.bfloat16, torch.float16, torch.float32}
"""Rows that a kernel of our own sums on a GPU, where torch's embedding_bag reaches a fifth of the bandwidth."""


@dataclass(frozen=True)
class Copies:
    """Which token each row is a copy of: `token_of_row` (R,).

    `row_by_token` (R,) has the rows in the order of their tokens. Those of token t lie from `starts[t]` to
    `starts[t + 1]` (T + 1,). All are int64.
    """

    token_of_row: Tensor
    row_by_token: Tensor
    starts: Tensor

    @classmethod
    def of(cls, token_of_row: Tensor, num_tokens: int, *, in_order: bool = False) -> Copies:
        """Find the rows of each token; `in_order` says that they already lie in the order of their tokens."""
        if in_order:
            tokens, rows = token_of_row, torch.arange(token_of_row.numel(), device=token_of_row.device)
        else:
            # Fewer key bits are fewer passes of the radix sort.
            tokens, rows = torch.sort(token_of_row.to(torch.int32), stable=True)
        every = torch.arange(num_tokens + 1, dtype=tokens.dtype, device=tokens.device)
        return cls(token_of_row, rows, torch.searchsorted(tokens, every))


def copy_tokens(x_TD: Tensor, copies: Copies) -> Tensor:
    """Return the rows (R, D) of the tokens (T, D), recomputable."""
    x_RD: Tensor = _CopyTokens.apply(x_TD, copies)  # type: ignore[no-untyped-call]  # untyped in torch
    announce(x_RD, lambda x: x.index_select(0, copies.token_of_row), x_TD)
    return x_RD


def sum_copies(y_RD: Tensor, copies: Copies) -> Tensor:
    """Return the sum (T, D) of each token's rows (R, D)."""
    y_TD: Tensor = _SumCopies.apply(y_RD, copies)  # type: ignore[no-untyped-call]  # untyped in torch
    return y_TD


def _sum(y_RD: Tensor, copies: Copies) -> Tensor:
    if y_RD.dtype in FLOAT32_SUMS and triton_reason(y_RD.device) is None:
        from bexp.kernels.expert_parallel.triton_sums import sum_rows  # noqa: PLC0415 - Triton is optional

        return sum_rows(y_RD, copies.row_by_token, copies.starts)
    return F.embedding_bag(copies.row_by_token, y_RD.contiguous(), copies.starts, mode="sum", include_last_offset=True)


class _CopyTokens(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x_TD.index_select(0, copies.token_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _sum(grad_RD, ctx.copies), None


class _SumCopies(Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return _sum(y_RD, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return grad_TD.index_select(0, ctx.copies.token_of_row), None
