"""torch's grouped GEMM: one launch for all experts, with their bounds on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.rows import Rows, sorted_rows
from bexp.kernels.probe import failure_of
from bexp.kernels.shapes import ExpertsShape

_STRIDE_BYTES = 16
_MAX_GROUPS = 1023
_TRACEABLE = frozenset({torch.bfloat16})  # torch runs other dtypes, but cannot trace them


def _gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    return F.grouped_mm(x_RK, w_EKN, offs=rows.ends)


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    rows = sorted_rows(routes_TK, w_in.shape[0], count=False)
    return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, _gemm)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if shape.num_experts > _MAX_GROUPS:
        return f"grouped_mm takes at most {_MAX_GROUPS} experts, not {shape.num_experts}"
    sizes = {"hidden_size": shape.hidden_size, "expert_ffn_hidden_size": shape.ffn_hidden_size}
    for name, size in sizes.items():
        if size * shape.dtype.itemsize % _STRIDE_BYTES:
            multiple = _STRIDE_BYTES // shape.dtype.itemsize
            return f"grouped_mm needs {name} to be a multiple of {multiple} in {dtype_name(shape.dtype)}, not {size}"

    dtype = shape.dtype
    x = torch.randn(32, 64, dtype=dtype, device=device, requires_grad=True)
    w = torch.randn(4, 64, 64, dtype=dtype, device=device, requires_grad=True)
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32, device=device)
    return failure_of(lambda: F.grouped_mm(x, w, offs=ends), device)


GROUPED_MM = ExpertBackend("grouped_mm", True, _check, _forward, _TRACEABLE)
