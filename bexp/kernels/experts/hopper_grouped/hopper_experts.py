"""Grouped GEMM on Hopper by warp-specialised Gluon kernels. One launch serves all experts; the host never waits."""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.hopper_grouped.gemm import grouped_gemm, multiply
from bexp.kernels.experts.hopper_grouped.launch import ALIGNMENT
from bexp.kernels.experts.rows import sorted_rows
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import triton_failure, triton_reason

_DTYPES = (torch.bfloat16, torch.float16)
_CAPABILITY = (9, 0)


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    rows = sorted_rows(routes_TK, w_in.shape[0], count=False)
    return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, grouped_gemm)


def gluon_reason() -> str | None:
    """Return why the kernels cannot be imported. Gluon is experimental, and its names change between versions."""
    try:
        from bexp.kernels.experts.hopper_grouped import rows_kernel, weights_kernel  # noqa: F401, PLC0415 - optional
    except (ImportError, AttributeError, TypeError) as error:
        return f"this Triton has another Gluon: {error}"
    return None


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    dtype = shape.dtype
    if dtype not in _DTYPES:
        return f"hopper_grouped multiplies bfloat16 and float16, not {dtype_name(dtype)}"
    sizes = (shape.hidden_size, shape.ffn_hidden_size)
    if any(size % ALIGNMENT for size in sizes):
        return f"hopper_grouped wants hidden sizes that are multiples of {ALIGNMENT}, not {sizes[0]} and {sizes[1]}"
    reason = triton_reason(device)
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"hopper_grouped needs compute capability 9.0, not {capability[0]}.{capability[1]}"
    reason = gluon_reason()
    if reason is not None:
        return reason
    x = torch.randn(32, 64, dtype=dtype, device=device, requires_grad=True)
    w = torch.randn(4, 64, 64, dtype=dtype, device=device, requires_grad=True)
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32, device=device)
    return triton_failure(lambda: multiply(x, w, ends), device)


HOPPER_GROUPED = ExpertBackend("hopper_grouped", False, _check, _forward)
