"""A grouped GEMM as an autograd function of three products: forward, the gradient of the rows, and of the matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd import Function

from bexp.kernels.autograd import applied, differentiable_once
from bexp.kernels.experts.matrices import stored


class RowsProduct(Protocol):
    """Each expert's rows by its matrix: (R, K) and (E, K, N), or (E, N, K) if `transposed`, to (R, N)."""

    def __call__(self, x_RK: Tensor, w: Tensor, ends: Tensor, /, *, transposed: bool = False) -> Tensor:
        """Run it; `w` is contiguous."""


class SumOverRows(Protocol):
    """Each expert's x^T grad over its rows: (R, K) and (R, N) to (E, K, N)."""

    def __call__(self, x_RK: Tensor, grad_RN: Tensor, ends: Tensor, /) -> Tensor:
        """Run it."""


class GemmProducts(NamedTuple):
    """What computes the product, the gradient of the rows, and the gradient of the matrices."""

    forward: RowsProduct
    rows: RowsProduct
    matrices: SumOverRows


def differentiable_gemm(products: GemmProducts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function of x (R, K), w (E, K, N) and ends (E,) to (R, N), which is differentiable in x and w.

    w may be the transpose of a contiguous tensor. Its gradient then is one, too.
    """

    def multiply(x_RK: Tensor, w_EKN: Tensor, ends: Tensor) -> Tensor:
        out: Tensor = _apply(x_RK, w_EKN, ends, products)
        return out

    return multiply


class _Gemm(Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, ends: Tensor, products: GemmProducts) -> Tensor:
        ctx.save_for_backward(x_RK, w_EKN, ends)
        ctx.products = products
        w, transposed = stored(w_EKN)
        return products.forward(x_RK, w, ends, transposed=transposed)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RK, w_EKN, ends = ctx.saved_tensors
        products: GemmProducts = ctx.products
        w, transposed = stored(w_EKN)
        grad_RN = grad_RN.contiguous()
        needs_x, needs_w, *_ = ctx.needs_input_grad
        grad_x = products.rows(grad_RN, w, ends, transposed=not transposed) if needs_x else None
        grad_w = None
        if needs_w:
            add_up = products.matrices
            grad_w = add_up(grad_RN, x_RK, ends).mT if transposed else add_up(x_RK, grad_RN, ends)
        return grad_x, grad_w, None, None


_apply = applied(_Gemm)
