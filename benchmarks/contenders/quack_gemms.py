"""The grouped GEMMs, as calls of `quack.gemm_interface`. The R rows lie in the experts' order.

quack wants gate and up projection of a column side by side. `concat_layout` makes it read and write a matrix that holds
one behind the other, if the matrix is contiguous along its other axis. So `w_in` (E, D, 2H) is the transpose of a
contiguous tensor here, and pre-activations and their gradients (R, 2H) have gate and up side by side.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bexp.kernels.activations import Activation

GATED_ACTIVATIONS: dict[Activation, str] = {"silu": "swiglu", "relu": "reglu"}
"""quack's names. Its gated GELU is the approximation by tanh, which no model means by "gelu"."""
_MANY_ROWS = 8192
"""From this mean number of rows an expert on, sums over rows have a tile of 128 x 256 instead of quack's 128 x 192.

On an H100 it was 13% (`w_out`) and 27% (`w_in`) faster at 32,768 rows, and 3% faster and 8% slower at 1,024. Nothing
between the two was measured (benchmarks/results/h100-quack.json).
"""


class Groups(NamedTuple):
    """Whose rows they are: `bounds` (E + 1,), the experts' first rows and the end; `token_of_row` (R,). All int32."""

    bounds: Tensor
    token_of_row: Tensor


def gate_up_gemm(
    x_TD: Tensor, w_in: Tensor, activation: Activation, groups: Groups, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the activation (R, H) and, if `keep`, its input (R, 2H), for the tokens of the rows."""
    from quack.gemm_interface import gemm_gated  # noqa: PLC0415 - optional

    pre, hidden = gemm_gated(
        x_TD,
        w_in,
        activation=GATED_ACTIVATIONS[activation],
        cu_seqlens_m=groups.bounds,
        A_idx=groups.token_of_row,
        store_preact=keep,
        concat_layout=("B",),
        tuned=False,
    )
    return hidden, pre


def rows_gemm(rows: Tensor, w: Tensor, groups: Groups, *, gate_and_up: bool = False) -> Tensor:
    """Multiply each expert's rows (R, K) by its matrix (E, K, N). `gate_and_up`: K is that of pre-activations."""
    from quack.gemm_interface import gemm  # noqa: PLC0415 - optional

    out: Tensor = gemm(rows, w, cu_seqlens_m=groups.bounds, concat_layout=("B",) if gate_and_up else None, tuned=False)
    return out


def differentiate_hidden(
    grad_TD: Tensor, w_out: Tensor, pre: Tensor, weights_R: Tensor, activation: Activation, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `pre`, the weighted activation (R, H), and the gradient of the weights (R,), float32.

    `grad_TD` is the gradient of the output, gathered for the rows; `weights_R` (float32) are their routing weights.
    """
    from quack.gemm_interface import gemm_dgated  # noqa: PLC0415 - optional

    grad_pre, hidden, grad_weights = gemm_dgated(
        grad_TD,
        w_out.mT,
        pre,
        activation=GATED_ACTIVATIONS[activation],
        colvec_scale=weights_R,
        colvec_reduce=True,
        cu_seqlens_m=groups.bounds,
        A_idx=groups.token_of_row,
        dynamic_scheduler=False,
        config=_tile(128, pingpong=True),  # the default's epilogue, of 128 x 192, spills registers
    )
    return grad_pre, hidden, grad_weights


def sum_over_rows(
    tokens_TM: Tensor, rows_RN: Tensor, out: Tensor, groups: Groups, *, gate_and_up: bool = False
) -> None:
    """Write, for each expert, the sum over its rows of token[row]^T row into `out` (E, M, N).

    `gate_and_up`: the rows are gradients of pre-activations, and `out` is the transpose of a contiguous tensor.
    """
    from quack.gemm_interface import gemm_tuned  # noqa: PLC0415 - optional

    many = rows_RN.shape[0] >= _MANY_ROWS * out.shape[0]
    gemm_tuned.fn(  # what `gemm` calls with `tuned=False`, which takes no tile
        tokens_TM.mT,
        rows_RN,
        out,
        cu_seqlens_k=groups.bounds,
        A_idx=groups.token_of_row,
        concat_layout=("out",) if gate_and_up else None,
        config=_tile(256, pingpong=False) if many else None,
    )


@functools.cache  # quack knows a configuration by its identity
def _tile(columns: int, *, pingpong: bool) -> Any:
    """A tile of 128 rows for two multiprocessors. `pingpong`: two warpgroups in turns, instead of both on one tile."""
    from quack.gemm_config import GemmConfig  # noqa: PLC0415 - optional

    return GemmConfig(tile_m=128, tile_n=columns, cluster_m=2, pingpong=pingpong, is_dynamic_persistent=False)


def bounds_of(ends: Tensor) -> Tensor:
    """The experts' first rows and the end (E + 1,), from the experts' ends (E,)."""
    return torch.cat((ends.new_zeros(1), ends))
