"""The autograd function of a grouped GEMM, with products of torch in place of kernels that need a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from bexp.kernels.experts.gemm_function import GemmProducts, differentiable_gemm
from tests.bexp.kernels import gemm_cases
from tests.bexp.kernels.gemm_cases import GemmCase
from tests.bexp.kernels.references import relative_error

CPU = torch.device("cpu")
CASE = GemmCase("tails", (5, 20, 3), 24, 16)


def multiply_rows(x_RK: Tensor, w: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    assert x_RK.is_contiguous() and w.is_contiguous(), "as kernels need them"
    rows = x_RK.tensor_split(ends.tolist()[:-1])
    return torch.cat([x @ (matrix.mT if transposed else matrix) for x, matrix in zip(rows, w, strict=True)])


def sum_over_rows(x_RK: Tensor, grad_RN: Tensor, ends: Tensor) -> Tensor:
    pairs = zip(*(rows.tensor_split(ends.tolist()[:-1]) for rows in (x_RK, grad_RN)), strict=True)
    return torch.stack([x.mT @ grad for x, grad in pairs])


def never(x_RK: Tensor, grad_RN: Tensor, ends: Tensor) -> Tensor:
    raise AssertionError("the matrices need no gradient")


multiply = differentiable_gemm(GemmProducts(multiply_rows, multiply_rows, sum_over_rows))


def test_matrices_are_read_as_they_lie_and_their_gradient_lies_the_same_way() -> None:
    x, w, grad = tensors = gemm_cases.inputs(CASE, torch.float64, CPU)
    ends = gemm_cases.ends_of(CASE.counts, CPU)
    for matrices in (w.clone(), w.mT.contiguous().mT):
        leaves = (x.detach().requires_grad_(), matrices.requires_grad_())
        out = multiply(*leaves, ends)
        found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        assert found[2].stride() == matrices.stride()
        for actual, wanted in zip(found, gemm_cases.expected(CASE, tensors), strict=True):
            assert relative_error(actual, wanted) <= 1e-12


def test_an_expanded_gradient_and_only_the_gradients_that_are_needed() -> None:
    x, w, _ = gemm_cases.inputs(CASE, torch.float64, CPU)
    ends = gemm_cases.ends_of(CASE.counts, CPU)
    x.requires_grad_()
    differentiable_gemm(GemmProducts(multiply_rows, multiply_rows, never))(x, w, ends).sum().backward()
    assert x.grad is not None
    experts = [expert for expert, count in enumerate(CASE.counts) for _ in range(count)]
    torch.testing.assert_close(x.grad, w.sum(-1)[experts])
