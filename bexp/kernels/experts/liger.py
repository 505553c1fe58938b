"""liger-kernel's fused MoE: grouped GEMMs in Triton that gather, activate and sum.

It tunes its kernels by hidden size and width in its first run, for minutes if Triton's cache lacks them. With
LIGER_FUSED_MOE_AUTOTUNE=0 it takes one tile for all sizes. It keeps its matrices as (E, 2H, D) and (E, D, H).
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.package import package_reason, shape_reason
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import launching_on, triton_reason

_PACKAGE, _MODULE = "liger-kernel", "liger_kernel.ops.fused_moe"


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    assert activation == "silu", "checked with the shape"
    if routes_TK.numel() == 0:
        return x_TD * 0.0
    function = importlib.import_module(_MODULE).LigerFusedMoEFunction
    routes = routes_TK.to(torch.int32)
    with launching_on(x_TD.device):
        out: Tensor = function.apply(x_TD, w_in.mT.contiguous(), w_out.mT.contiguous(), routes, weights_TK)
    return out


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    return (
        shape_reason(_PACKAGE, shape, (torch.bfloat16, torch.float16), gated_silu=True)
        or triton_reason(device)
        or package_reason(_PACKAGE, ("liger_kernel", _MODULE))
    )


LIGER = ExpertBackend("liger", False, _check, _forward)
