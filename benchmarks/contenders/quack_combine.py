"""Sums the rows of each token, which lie in the experts' order."""

from __future__ import annotations

from torch import Tensor


def sum_rows(rows_RD: Tensor, row_of_pair: Tensor, top_k: int, weights_TK: Tensor | None = None) -> Tensor:
    """Return the sum over k of each token's rows (T, D), times `weights_TK` if given. `row_of_pair` (T * K,) is int32.

    On a CUDA device, one kernel takes the sum in float32.
    """
    if rows_RD.is_cuda:
        from benchmarks.contenders import quack_combine_kernel as combine_kernel  # noqa: PLC0415 - needs Triton

        return combine_kernel.sum_rows(rows_RD, row_of_pair, top_k, weights_TK)
    rows_TKD: Tensor = rows_RD.index_select(0, row_of_pair).unflatten(0, (-1, top_k))
    return (rows_TKD if weights_TK is None else rows_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)
