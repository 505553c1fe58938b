"""One batched GEMM over all experts, each padded to the rows of the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.rows import Rows, padded_rows
from bexp.kernels.shapes import ExpertsShape


def _gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    num_experts, k, n = w_EKN.shape
    return torch.bmm(x_RK.view(num_experts, -1, k), w_EKN).view(-1, n)


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    rows, _ = padded_rows(routes_TK, w_in.shape[0])
    return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, _gemm)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    return None  # plain torch operations, which run everywhere


BMM = ExpertBackend("bmm", True, _check, _forward)
