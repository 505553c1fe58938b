from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from bexp.kernels.experts import cublas_grouped
from bexp.kernels.experts.cublas_grouped import CUBLAS_GROUPED, OP_T, CublasError, CublasGemm, Product, library
from tests.bexp.kernels import expert_cases, gemm_cases
from tests.bexp.kernels.references import relative_error
from tests.bexp.kernels.test_experts import experts_shape

CPU = torch.device("cpu")


def column_major(address: int, rows: int, columns: int, leading: int) -> np.ndarray:
    """A view of memory as cuBLAS sees it: (rows, columns), each column `leading` numbers after the one before."""
    assert leading >= rows
    length = leading * (columns - 1) + rows
    flat = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (length,))
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (4, 4 * leading))


def multiply_on_the_host(products: list[Product], dtype: torch.dtype, device: torch.device) -> None:
    """What cuBLAS does, by its definition, on host memory."""
    assert dtype is torch.float32
    assert device.type == "cpu"
    for p in products:
        assert min(p.m, p.n, p.k) > 0, "cuBLAS takes no empty operand with a leading dimension"
        a = column_major(p.a, p.k, p.m, p.lda).T if p.op_a == OP_T else column_major(p.a, p.m, p.k, p.lda)
        b = column_major(p.b, p.n, p.k, p.ldb).T if p.op_b == OP_T else column_major(p.b, p.k, p.n, p.ldb)
        column_major(p.c, p.m, p.n, p.ldc)[:] = a @ b


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas_grouped, "multiply_all", multiply_on_the_host)


def gemm(x: Tensor, w: Tensor, counts: tuple[int, ...]) -> Tensor:
    out: Tensor = CublasGemm.apply(x, w, counts)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", gemm_cases.TINY, ids=lambda case: case.name)
def test_every_product_of_every_expert(case: gemm_cases.GemmCase, transposed: bool) -> None:
    x, w, grad = gemm_cases.inputs(case, torch.float32, CPU)
    tensors = x, expert_cases.transposed_storage(w, transposed), grad
    found = gemm_cases.run(gemm, case, tensors)
    for actual, wanted in zip(found, gemm_cases.expected(case, tensors), strict=True):
        assert relative_error(actual, wanted) <= 1e-5


@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
def test_the_whole_ffn(case: expert_cases.ExpertCase) -> None:
    errors = expert_cases.errors(CUBLAS_GROUPED, case, torch.float32, CPU)
    assert max(errors.values()) <= 1e-5, errors


def test_a_strided_gradient_and_a_shifted_operand_are_packed_first() -> None:
    counts = (3, 0, 5)
    x = torch.randn(9, 16)[1:].requires_grad_()
    w = torch.randn(3, 16, 8).requires_grad_()
    gemm(x, w, counts).sum().backward()  # the gradient of a sum is one number, expanded
    wanted = torch.stack([x.detach()[:3].sum(0), torch.zeros(16), x.detach()[3:].sum(0)])
    assert w.grad is not None
    torch.testing.assert_close(w.grad, wanted[:, :, None].expand(-1, -1, 8))


def test_the_gradient_of_an_expert_without_rows_is_zero() -> None:
    case = gemm_cases.TINY[0]
    _, _, grad_w = gemm_cases.run(gemm, case, gemm_cases.inputs(case, torch.float32, CPU))
    assert all((grad == 0).all() == (count == 0) for grad, count in zip(grad_w, case.counts, strict=True))


def test_reasons() -> None:
    assert CUBLAS_GROUPED.unsupported_reason(experts_shape(), CPU) == "cuBLAS needs a CUDA device"
    cuda = torch.device("cuda")
    odd = experts_shape(width=30, dtype=torch.float32)
    assert CUBLAS_GROUPED.unsupported_reason(odd, cuda) == (
        "cuBLAS' grouped GEMM needs expert_ffn_hidden_size to be a multiple of 4 in float32, not 30"
    )


def test_a_library_that_is_not_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bexp.kernels.experts.cublas_grouped._loaded_library", lambda: "libcublas.so.none")
    library.cache_clear()
    with pytest.raises(CublasError, match="cuBLAS cannot be loaded"):
        library()
    assert "cuBLAS cannot be loaded" in (CUBLAS_GROUPED.unsupported_reason(experts_shape(), torch.device("cuda")) or "")
    library.cache_clear()
