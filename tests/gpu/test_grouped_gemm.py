"""The GEMM-level expert back ends on a CUDA device: every distribution, every format, outputs poisoned beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bexp.kernels.experts.hopper_grouped import gemm as hopper
from bexp.kernels.experts.registry import expert_backend
from bexp.kernels.experts.triton_gemm import multiply, multiply_rows, sum_over_rows
from bexp.kernels.experts.triton_tiles import LARGE, LOW, SHALLOW, SMALL, SQUARE
from bexp.kernels.shapes import ExpertsShape
from tests.bexp.kernels import expert_cases, gemm_cases
from tests.bexp.kernels.gemm_cases import GemmCase
from tests.bexp.kernels.references import relative_error
from tests.gpu.gemm_problems import CASES, CUDA, NAN, TOLERANCES, hopper_gemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]

OURS = ("triton_grouped", "hopper_grouped")
TILES = {
    "large": LARGE,
    "square": SQUARE,
    "low": LOW,
    "shallow": SHALLOW,
    "small": SMALL,
    "large in halves": replace(LARGE, num_stages=4, halves=True),
    "large and flat": replace(LARGE, flatten=True),
    "square and flat": replace(SQUARE, flatten=True),
}
UNALIGNED = GemmCase("sizes that are no multiple of anything", (9, 0, 300, 77), 333, 117)


def triton_gemm(x: Tensor, w: Tensor, counts: tuple[int, ...]) -> Tensor:
    return multiply(x, w, gemm_cases.ends_of(counts, CUDA))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, UNALIGNED], ids=lambda case: case.name)
def test_triton(case: GemmCase, dtype: torch.dtype) -> None:
    errors = gemm_cases.errors(triton_gemm, case, dtype, CUDA)
    assert max(errors.values()) <= TOLERANCES[dtype], errors


@pytest.mark.parametrize("bulk_copies", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("name", TILES)
def test_all_tiles(name: str, bulk_copies: bool) -> None:
    tiles = replace(TILES[name], bulk_copies=bulk_copies)
    for case in (CASES[0], CASES[7], CASES[8], CASES[13]):
        x, w, grad = tensors = gemm_cases.inputs(case, torch.bfloat16, CUDA)
        ends = gemm_cases.ends_of(case.counts, CUDA)
        actual = [
            multiply_rows(x, w, ends, out=torch.full_like(grad, NAN), tiles=tiles),
            multiply_rows(grad, w, ends, transposed=True, out=torch.full_like(x, NAN), tiles=tiles),
            sum_over_rows(x, grad, ends, out=torch.full_like(w, NAN), tiles=tiles),
        ]
        for value, wanted in zip(actual, gemm_cases.expected(case, tensors), strict=True):
            assert relative_error(value, wanted) <= 1e-2, case.name


@pytest.mark.parametrize("gemm", [triton_gemm, hopper_gemm], ids=["triton", "hopper"])
def test_the_same_inputs_give_the_same_bits(gemm: gemm_cases.Gemm) -> None:
    case = CASES[8]
    tensors = gemm_cases.inputs(case, torch.bfloat16, CUDA)
    first, second = (gemm_cases.run(gemm, case, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_another_stream_and_fresh_inputs() -> None:
    """Results do not depend on what ran before."""
    for seed in range(3):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            case = CASES[7]
            tensors = gemm_cases.inputs(case, torch.bfloat16, CUDA, seed)
            for gemm in (triton_gemm, hopper_gemm):
                actual = gemm_cases.run(gemm, case, tensors)
                for value, wanted in zip(actual, gemm_cases.expected(case, tensors), strict=True):
                    assert relative_error(value, wanted) <= 1e-2
        stream.synchronize()


@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", OURS)
def test_the_whole_ffn(name: str, case: expert_cases.ExpertCase) -> None:
    case = replace(case, width=128)
    errors = expert_cases.errors(expert_backend(name), case, torch.bfloat16, CUDA)
    assert errors["out"] <= 1e-2, errors
    assert max(errors.values()) <= 2e-2, errors  # through several operations, each rounded to bfloat16


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 8), (512, 8), (8, 8), (1, 1)])
def test_back_ends_agree_with_the_loop(name: str, num_experts: int, top_k: int) -> None:
    case = expert_cases.ExpertCase("large", 2048, num_experts, top_k, hidden=512, width=256, skew=1.0)
    routes, tensors = expert_cases.problem(case, torch.bfloat16, CUDA)
    wanted = expert_cases.run(expert_backend("loop"), case, routes, tensors)
    first, second = (expert_cases.run(expert_backend(name), case, routes, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for value, expected in zip(first, wanted, strict=True):
        assert relative_error(value, expected) <= 1e-2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("function", [multiply, hopper.multiply])
def test_triton_never_waits_for_the_device(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    case = CASES[7]
    x, w, grad = gemm_cases.inputs(case, torch.bfloat16, CUDA)
    ends = gemm_cases.ends_of(case.counts, CUDA)
    x.requires_grad_()
    w.requires_grad_()
    function(x, w, ends).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(x, w, ends).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.alone
def test_operands_of_more_than_two_to_the_31_numbers() -> None:
    """Offsets of rows, and of an expert's matrix, do not fit in 32 bits."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB")
    torch.use_deterministic_algorithms(False)  # the poison of large tensors would take longer than the test
    rows, k, n = 1_100_000, 2048, 128
    x = torch.randn(rows, k, device=CUDA, dtype=torch.bfloat16)
    w = torch.randn(3, k, n, device=CUDA, dtype=torch.bfloat16) / k**0.5
    ends = gemm_cases.ends_of((1_000_000, 0, 100_000), CUDA)
    for bulk in (True, False):
        tiles = replace(SQUARE, bulk_copies=bulk)
        out = multiply_rows(x, w, ends, tiles=tiles)
        assert relative_error(out[-1000:], x[-1000:].double() @ w[2].double()) <= 1e-2
        assert relative_error(out[:1000], x[:1000].double() @ w[0].double()) <= 1e-2
        grad_w = sum_over_rows(x, out, ends, tiles=tiles)
        wanted = x[1_000_000:].float().T @ out[1_000_000:].float()
        assert relative_error(grad_w[2], wanted) <= 1e-2
    wide = torch.randn(9, 16384, 16384, device=CUDA, dtype=torch.bfloat16)
    few = torch.randn(64, 16384, device=CUDA, dtype=torch.bfloat16)
    ends = gemm_cases.ends_of((30, *([0] * 7), 34), CUDA)
    for bulk in (True, False):
        tiles = replace(LOW, bulk_copies=bulk)
        out = multiply_rows(few, wide, ends, tiles=tiles)
        assert relative_error(out[30:], few[30:].float() @ wide[8].float()) <= 1e-2
        grad_w = sum_over_rows(few, few, ends, out=wide.clone(), tiles=tiles)
        assert relative_error(grad_w[8], few[30:].float().T @ few[30:].float()) <= 1e-2
        assert (grad_w[7] == 0).all()


def test_support() -> None:
    def reasons(dtype: torch.dtype, width: int = 128) -> dict[str, str | None]:
        shape = ExpertsShape(hidden_size=256, ffn_hidden_size=width, num_experts=8, top_k=2, dtype=dtype)
        return {name: expert_backend(name).unsupported_reason(shape, CUDA) for name in OURS}

    assert reasons(torch.bfloat16) == dict.fromkeys(OURS)
    assert reasons(torch.float16) == dict.fromkeys(OURS)
    single = reasons(torch.float32)
    assert "float32" in (single["triton_grouped"] or "")
    assert "float32" in (single["hopper_grouped"] or "")
    assert "multiples of 8" in (reasons(torch.bfloat16, width=36)["hopper_grouped"] or "")
