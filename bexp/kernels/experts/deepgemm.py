"""DeepGEMM's grouped GEMMs of bfloat16, of the package deep_gemm 2.1 or later.

Rows are padded to whole blocks, each of one expert: `m_grouped_bf16_gemm_*_contiguous` multiplies them by matrices that
lie either way, and `k_grouped_bf16_gemm_tn_contiguous` sums over them into float32. The transformers library uses the
first alone, so that its `deepgemm` has no gradients.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bexp.kernels.activations import Activation
from bexp.kernels.experts.block_sparse.topology import blocked_rows
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.matrices import stored
from bexp.kernels.experts.package import package_reason, shape_reason
from bexp.kernels.experts.rows import Rows
from bexp.kernels.shapes import ExpertsShape
from bexp.kernels.triton_support import aligned, launching_on

_PACKAGE, _MODULE = "deep_gemm", "deep_gemm"
_CAPABILITY = (9, 0)
_NAMES = (
    "get_mk_alignment_for_contiguous_layout",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "k_grouped_bf16_gemm_tn_contiguous",
)


@dataclass(frozen=True)
class _Blocks:
    """The expert of each row (R,) int32, and each expert's rows, padding included, on the host and the device."""

    expert_of_row: Tensor
    heights: list[int]
    device_heights: Tensor


class _DeepGemm(Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, blocks: _Blocks) -> Tensor:
        w, transposed = stored(w_EKN)
        x_RK = aligned(x_RK)
        ctx.save_for_backward(x_RK, w)
        ctx.blocks, ctx.transposed = blocks, transposed
        return _multiply(x_RK, w, blocks, w_EKN.shape[2], transposed=transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RK, w = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        grad_RN = aligned(grad_RN)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(grad_RN, w, blocks, x_RK.shape[1], transposed=not ctx.transposed)
        if ctx.needs_input_grad[1]:
            first, second = (grad_RN, x_RK) if ctx.transposed else (x_RK, grad_RN)
            sums = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
            with launching_on(w.device):
                _library().k_grouped_bf16_gemm_tn_contiguous(
                    first, second, sums, blocks.heights, blocks.device_heights, sums
                )
            grad_w = sums.to(w.dtype)
            grad_w = grad_w.mT if ctx.transposed else grad_w
        return grad_x, grad_w, None


def _multiply(x_RK: Tensor, w: Tensor, blocks: _Blocks, n: int, *, transposed: bool) -> Tensor:
    """x (R, K) times w (E, K, N), or (E, N, K) if `transposed`."""
    out = x_RK.new_empty(x_RK.shape[0], n)
    kind = "nt" if transposed else "nn"
    with launching_on(x_RK.device):
        getattr(_library(), f"m_grouped_bf16_gemm_{kind}_contiguous")(x_RK, w, out, blocks.expert_of_row)
    return out


def _library() -> Any:
    return importlib.import_module(_MODULE)


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    if routes_TK.numel() == 0:
        return x_TD * 0.0
    num_experts, block = w_in.shape[0], int(_library().get_mk_alignment_for_contiguous_layout())
    rows = blocked_rows(routes_TK, num_experts, block)
    heights = [-(-count // block) * block for count in rows.counts]
    device_heights = torch.tensor(heights, dtype=torch.int32).to(x_TD.device, non_blocking=True)
    experts = torch.arange(num_experts, dtype=torch.int32, device=x_TD.device)
    blocks = _Blocks(experts.repeat_interleave(device_heights, output_size=sum(heights)), heights, device_heights)

    def gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
        out: Tensor = _DeepGemm.apply(x_RK, w_EKN, blocks)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, gemm)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    reason = shape_reason(_PACKAGE, shape, (torch.bfloat16,), multiple=64)
    if reason is not None:
        return reason
    if device.type != "cuda":
        return f"{_PACKAGE} needs a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"{_PACKAGE}'s rows by expert need compute capability 9.0, not {capability[0]}.{capability[1]}"
    reason = package_reason(_PACKAGE, (_MODULE,))
    if reason is not None:
        return reason
    missing = [name for name in _NAMES if not hasattr(_library(), name)]
    return f"this {_PACKAGE} has no {missing[0]}" if missing else None


DEEPGEMM = ExpertBackend("deepgemm", False, _check, _forward)
