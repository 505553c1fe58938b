"""The three products of a grouped GEMM by each back end, and GEMMs that take each product from another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bexp.kernels.experts import triton_gemm
from bexp.kernels.experts.gemm_function import GemmProducts, RowsProduct, SumOverRows, differentiable_gemm
from bexp.kernels.experts.grouped_ffn import GroupedGemm
from bexp.kernels.experts.hopper_grouped import gemm as hopper_gemm
from bexp.kernels.experts.matrices import stored
from bexp.kernels.experts.rows import Rows

STOCK = "grouped_mm"
EVEN = "bmm"
"""A batched product, for rows of which the host knows that every expert has as many."""
PRODUCTS = ("forward", "rows", "matrices")
"""The product, the gradient of the rows, and the gradient of the matrices."""
_SEPARATOR = "+"


@dataclass(frozen=True, slots=True)
class Products:
    """A back end's kernels, and its own differentiable GEMM."""

    multiply: RowsProduct
    add_up: SumOverRows
    gemm: GroupedGemm


def _stock_multiply(x_RK: Tensor, w: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    return F.grouped_mm(x_RK, w.mT if transposed else w, offs=ends)


def _stock_add_up(x_RK: Tensor, grad_RN: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x_RK.t(), grad_RN, offs=ends)


def _stock_gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    return F.grouped_mm(x_RK, w_EKN, offs=rows.ends)


def _even_multiply(x_RK: Tensor, w: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    w_EKN = w.mT if transposed else w
    num_experts, k, n = w_EKN.shape
    return torch.bmm(x_RK.view(num_experts, -1, k), w_EKN).view(-1, n)


def _even_add_up(x_RK: Tensor, grad_RN: Tensor, ends: Tensor) -> Tensor:
    num_experts = ends.shape[0]
    return torch.bmm(x_RK.view(num_experts, -1, x_RK.shape[1]).mT, grad_RN.view(num_experts, -1, grad_RN.shape[1]))


def _even_gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
    return _even_multiply(x_RK, w_EKN, rows.ends)


KERNELS = {
    STOCK: Products(_stock_multiply, _stock_add_up, _stock_gemm),
    EVEN: Products(_even_multiply, _even_add_up, _even_gemm),
    "triton_grouped": Products(triton_gemm.multiply_rows, triton_gemm.sum_over_rows, triton_gemm.grouped_gemm),
    "hopper_grouped": Products(hopper_gemm.multiply_rows, hopper_gemm.sum_over_rows, hopper_gemm.grouped_gemm),
}
"""The back ends whose products can be mixed. None of them waits for the device in bfloat16. `EVEN` takes even rows."""


def mixed(forward: str, rows: str, matrices: str) -> str:
    """Return the plan that takes each product from one back end."""
    names = (forward, rows, matrices)
    return forward if len(set(names)) == 1 else _SEPARATOR.join(names)


def gemm_of(plan: str) -> GroupedGemm | None:
    """Return the differentiable GEMM of a plan; None if no back end has that name here."""
    names = plan.split(_SEPARATOR)
    if any(name not in KERNELS for name in names) or len(names) not in (1, len(PRODUCTS)):
        return None
    if len(names) == 1:
        return KERNELS[plan].gemm
    forward, rows, matrices = (KERNELS[name] for name in names)
    multiply = differentiable_gemm(GemmProducts(forward.multiply, rows.multiply, matrices.add_up))
    return lambda x, w, where: multiply(x, w, where.ends)


def product_runs(x_RK: Tensor, w_EKN: Tensor, grad_RN: Tensor, ends: Tensor, names: list[str]) -> dict[str, Any]:
    """Return a function for every product of every back end, by product and name, without a graph."""
    w, transposed = stored(w_EKN)
    pair = (grad_RN, x_RK) if transposed else (x_RK, grad_RN)

    def without_graph(function: Callable[..., Tensor], *arguments: Tensor, **options: bool) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                return function(*arguments, ends, **options)

        return run

    found: dict[str, dict[str, Callable[[], Tensor]]] = {product: {} for product in PRODUCTS}
    for name in names:
        kernels = KERNELS[name]
        found["forward"][name] = without_graph(kernels.multiply, x_RK, w, transposed=transposed)
        found["rows"][name] = without_graph(kernels.multiply, grad_RN, w, transposed=not transposed)
        found["matrices"][name] = without_graph(kernels.add_up, *pair)
    return found
