"""The expert FFN that GEMM-level back ends share: gather, GEMM, activation, GEMM, sum."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bexp.kernels.activations import Activation, activate
from bexp.kernels.experts.rows import Rows, combine, dispatch
from bexp.kernels.selective_recompute import recomputable


class GroupedGemm(Protocol):
    """Multiplies each expert's rows by its matrix: (R, K) and (E, K, N) to (R, N)."""

    def __call__(self, x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
        """Run it."""


def grouped_ffn(
    x_TD: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: Activation,
    rows: Rows,
    gemm: GroupedGemm,
) -> Tensor:
    """Send the tokens through their experts; shapes as in `ExpertFFN`.

    The routing weight is applied between the two GEMMs, which gives the same result as after the second. The rows that
    the second GEMM returns then need only be summed, and none of them is kept for backward.
    """
    x_RD, weights_R = dispatch(x_TD, weights_TK, rows)
    hidden_size = w_out.shape[1]
    gated = w_in.shape[2] == 2 * hidden_size
    assert gated or w_in.shape[2] == hidden_size, "w_in is (E, D, H) or (E, D, 2H) for w_out (E, H, D)"
    pre_RH = recomputable(lambda x: gemm(x, w_in, rows), x_RD, product=True)
    h_RH = activate(pre_RH, activation, gated=gated, row_weights=weights_R)
    return combine(gemm(h_RH, w_out, rows), rows, weights_TK.shape[1])
