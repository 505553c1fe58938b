"""cuBLAS' grouped batched GEMM: one call for all experts, each with its own number of rows.

cuBLAS is column-major. It sees a row-major (r, c) matrix without gaps as the (c, r) transpose with a leading dimension
of c. So the transposed product is requested, and no operand is moved. X (m, k) are the rows of an expert, W (k, n) is
its matrix and G (m, n) the gradient of Y = X W, all row-major:

    wanted          asked for                 A       op(A)            B       op(B)            m'  n'  k'  C, ldc
    Y  = X W        Y^T  (n, m) = W^T X^T     W, n    N: (n, k)        X, k    N: (k, m)        n   m   k   Y, n
    dX = G W^T      dX^T (k, m) = W G^T       W, n    T of (n, k)      G, n    N: (n, m)        k   m   n   dX, k
    dW = X^T G      dW^T (n, k) = G^T X       G, n    N: (n, m)        X, k    T of (k, m)      n   k   m   dW, n

An expert without rows is left out: a group of size 0 is an error in the first two products. In the third its gradient
is a sum over nothing, and zeros are written for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from benchmarks.contenders.cublas_library import OP_N, OP_T, CublasError, Product, library, multiply_all
from bexp.kernels.activations import Activation
from bexp.kernels.dtypes import dtype_name
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.grouped_ffn import grouped_ffn
from bexp.kernels.experts.rows import Rows, sorted_rows
from bexp.kernels.probe import failure_of
from bexp.kernels.shapes import ExpertsShape

_ALIGNMENT_BYTES = 16


def forward_products(x_RK: Tensor, w_EKN: Tensor, out_RN: Tensor, counts: tuple[int, ...]) -> list[Product]:
    """Y = X W for every expert that has rows."""
    _, k, n = w_EKN.shape
    return [
        Product(OP_N, OP_N, n, count, k, a=_at(w_EKN, e), lda=n, b=_at(x_RK, row), ldb=k, c=_at(out_RN, row), ldc=n)
        for e, row, count in _with_rows(counts)
    ]


def rows_gradient_products(grad_RN: Tensor, w_EKN: Tensor, out_RK: Tensor, counts: tuple[int, ...]) -> list[Product]:
    """dX = G W^T for every expert that has rows."""
    _, k, n = w_EKN.shape
    return [
        Product(OP_T, OP_N, k, count, n, a=_at(w_EKN, e), lda=n, b=_at(grad_RN, row), ldb=n, c=_at(out_RK, row), ldc=k)
        for e, row, count in _with_rows(counts)
    ]


def weights_gradient_products(x_RK: Tensor, grad_RN: Tensor, out_EKN: Tensor, counts: tuple[int, ...]) -> list[Product]:
    """dW = X^T G for every expert that has rows."""
    _, k, n = out_EKN.shape
    return [
        Product(OP_N, OP_T, n, k, count, a=_at(grad_RN, row), lda=n, b=_at(x_RK, row), ldb=k, c=_at(out_EKN, e), ldc=n)
        for e, row, count in _with_rows(counts)
    ]


class CublasGemm(Function):
    """Three calls: the product, and in backward its two gradients."""

    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, counts: tuple[int, ...]) -> Tensor:
        """x (R, K), w (E, K, N) and the experts' rows to (R, N)."""
        x_RK, w_EKN = _packed(x_RK), _packed(w_EKN)
        ctx.save_for_backward(x_RK, w_EKN)
        ctx.counts = counts
        out = x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])
        multiply_all(forward_products(x_RK, w_EKN, out, counts), x_RK.dtype, x_RK.device)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of x and w."""
        x_RK, w_EKN = ctx.saved_tensors
        counts: tuple[int, ...] = ctx.counts
        grad_RN = _packed(grad_RN)
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x_RK)
            multiply_all(rows_gradient_products(grad_RN, w_EKN, grad_x, counts), x_RK.dtype, x_RK.device)
        if ctx.needs_input_grad[1]:
            grad_w = torch.empty_like(w_EKN)
            for out, count in zip(grad_w.unbind(), counts, strict=True):
                if not count:
                    out.zero_()
            multiply_all(weights_gradient_products(x_RK, grad_RN, grad_w, counts), x_RK.dtype, x_RK.device)
        return grad_x, grad_w, None


def grouped_gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    """As in `GroupedGemm`; the rows must have been counted."""
    out: Tensor = CublasGemm.apply(x_RK, w_EKN, rows.counts)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _forward(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    rows = sorted_rows(routes_TK, w_in.shape[0], count=True)
    return grouped_ffn(x_TD, weights_TK, w_in, w_out, activation, rows, grouped_gemm)


def _check(shape: ExpertsShape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "cuBLAS needs a CUDA device"
    sizes = {"hidden_size": shape.hidden_size, "expert_ffn_hidden_size": shape.ffn_hidden_size}
    for name, size in sizes.items():
        if size * shape.dtype.itemsize % _ALIGNMENT_BYTES:
            multiple = _ALIGNMENT_BYTES // shape.dtype.itemsize
            dtype = dtype_name(shape.dtype)
            return f"cuBLAS' grouped GEMM needs {name} to be a multiple of {multiple} in {dtype}, not {size}"
    try:
        library()
    except CublasError as error:
        return str(error)

    x = torch.randn(32, 64, dtype=shape.dtype, device=device, requires_grad=True)
    w = torch.randn(4, 64, 64, dtype=shape.dtype, device=device, requires_grad=True)
    return failure_of(lambda: CublasGemm.apply(x, w, (8, 0, 16, 8)), device)  # type: ignore[no-untyped-call]  # in torch


def _with_rows(counts: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Expert, its first row, and how many."""
    row = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, row, count
        row += count


def _at(tensor: Tensor, index: int) -> int:
    """Address of `tensor[index]`."""
    return tensor.data_ptr() + index * tensor.stride(0) * tensor.element_size()


def _packed(tensor: Tensor) -> Tensor:
    """Without gaps and on a boundary of 16 bytes, as cuBLAS' kernels want it: a copy unless it is so already."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()


CUBLAS_GROUPED = ExpertBackend("cublas_grouped", False, _check, _forward, only_when_named=True, waits=True)
