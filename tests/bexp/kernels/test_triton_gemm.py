from __future__ import annotations

from typing import Any

import pytest
import torch

from bexp.kernels.experts import triton_gemm
from bexp.kernels.experts.triton_gemm import TRITON_GROUPED, multiply, multiply_rows, sum_over_rows
from bexp.kernels.experts.triton_tiles import Tiles, rows_tiles, weights_tiles
from bexp.kernels.launcher import KEPT_LAUNCHES
from tests.bexp.kernels import gemm_cases
from tests.bexp.kernels.gemm_cases import GemmCase
from tests.bexp.kernels.interpreter import interpreted
from tests.bexp.kernels.references import relative_error
from tests.bexp.kernels.test_experts import experts_shape

CPU = torch.device("cpu")
SMALL = Tiles(16, 16, 16, num_stages=1, num_warps=4, group_m=2)


@pytest.fixture(params=[False, True], ids=["pointers", "descriptors"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way the operands take; the interpreter knows both."""

    monkeypatch.setattr(triton_gemm, "has_bulk_copies", lambda device: bool(request.param))


@pytest.fixture(autouse=True)
def no_launches_of_another_test() -> None:
    triton_gemm._multiply_rows.cache_clear()
    triton_gemm._sum_over_rows.cache_clear()


@interpreted
def test_each_kind_of_operands_has_launches_of_its_own() -> None:
    """All that Triton specialises a kernel on, but the addresses, is in the key that a launch is kept by."""
    kept = triton_gemm._multiply_rows.cache_info
    ends, x, w = gemm_cases.ends_of((2, 4), CPU), torch.randn(6, 16), torch.randn(2, 16, 16)
    others: list[dict[str, Any]] = [
        {},
        {"x": x.half(), "w": w.half()},
        {"ends": ends.long()},
        {"x": torch.randn(6, 40)[:, :16]},
        {"x": torch.randn(97)[1:].view(6, 16)},
        {"x": torch.randn(5, 16), "ends": ends - 1},
        {"w": torch.randn(2, 16, 24)},
        {"transposed": True},
        {"tiles": SMALL},
    ]
    for number, other in enumerate(others, start=1):
        for _ in range(2):
            given = {"x": x, "w": w, "ends": ends, **other}
            multiply_rows(given.pop("x"), given.pop("w"), given.pop("ends"), **given)
        assert kept().currsize == kept().misses == number
    assert kept().maxsize == KEPT_LAUNCHES


@interpreted
@pytest.mark.usefixtures("copies")
def test_matrices_are_read_as_they_lie_and_their_gradient_lies_the_same_way() -> None:
    case = GemmCase("tails", (5, 20, 3), 24, 16)
    x, w, grad = gemm_cases.inputs(case, torch.float32, CPU)
    ends = gemm_cases.ends_of(case.counts, CPU)
    x.requires_grad_()
    contiguous = w.clone().requires_grad_()
    lying = w.mT.contiguous().mT.requires_grad_()
    found = []
    for matrices in (contiguous, lying):
        out = multiply(x, matrices, ends)
        found.append((out, *torch.autograd.grad(out, (x, matrices), grad)))
    assert found[1][2].stride() == lying.stride() != contiguous.stride()
    for actual, wanted in zip(found[1], found[0], strict=True):
        assert relative_error(actual, wanted) <= 1e-6


@interpreted
@pytest.mark.usefixtures("copies")
def test_what_another_expert_computes_does_not_leak() -> None:
    """An infinite row of one expert leaves the others' results finite."""
    case = GemmCase("tails", (5, 20, 3), 16, 16)
    x, w, grad = gemm_cases.inputs(case, torch.float32, CPU)
    x[5:25], grad[5:25], w[1] = torch.inf, torch.inf, torch.inf
    ends = gemm_cases.ends_of(case.counts, CPU)
    out = multiply_rows(x, w, ends, tiles=SMALL)
    grad_w = sum_over_rows(x, grad, ends, tiles=SMALL)
    assert out[:5].isfinite().all()
    assert out[25:].isfinite().all()
    assert grad_w[[0, 2]].isfinite().all()


@interpreted
@pytest.mark.parametrize("group_m", [1, 3, 8])
def test_many_programs_share_the_tiles(group_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program takes its share whatever the order within an expert."""
    monkeypatch.setattr(triton_gemm, "num_multiprocessors", lambda device: 5)
    tiles = Tiles(16, 16, 16, num_stages=1, num_warps=4, group_m=group_m)
    case = GemmCase("many tiles", (70, 0, 33, 1), 48, 56)
    x, w, grad = tensors = gemm_cases.inputs(case, torch.float32, CPU)
    ends = gemm_cases.ends_of(case.counts, CPU)
    out, _, grad_w = gemm_cases.expected(case, tensors)
    poison = torch.full_like(grad, float("nan"))
    assert relative_error(multiply_rows(x, w, ends, out=poison, tiles=tiles), out) <= 1e-5
    assert relative_error(sum_over_rows(x, grad, ends, tiles=tiles), grad_w) <= 1e-5


@interpreted
def test_gradients_of_a_strided_input_and_an_expanded_gradient() -> None:
    ends = gemm_cases.ends_of((2, 0, 4), CPU)
    wide = torch.randn(6, 40)
    x = wide[:, :16].requires_grad_()
    w = torch.randn(3, 16, 16).requires_grad_()
    multiply(x, w, ends).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    wanted = w.detach().sum(-1)[[0, 0, 2, 2, 2, 2]]
    torch.testing.assert_close(x.grad, wanted)
    assert (w.grad[1] == 0).all()


@pytest.mark.parametrize("rows_per_expert", [1, 64, 128, 512, 8192])
def test_tiles_fit_the_shared_memory_of_a_small_device(rows_per_expert: float, monkeypatch: pytest.MonkeyPatch) -> None:
    small = type("Properties", (), {"shared_memory_per_block_optin": 101_376})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    for choose in (rows_tiles, weights_tiles):
        assert choose(rows_per_expert, torch.device("cuda")).shared_bytes <= 101_376


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = TRITON_GROUPED.unsupported_reason
    assert reason(experts_shape(), CPU) == "Triton kernels need a CUDA device"
    single = experts_shape(dtype=torch.float32)
    assert reason(single, torch.device("cuda")) == "triton_grouped multiplies bfloat16 and float16, not float32"
    monkeypatch.setattr("bexp.kernels.triton_support.find_spec", lambda name: None)
    assert reason(experts_shape(), torch.device("cuda")) == "Triton is not installed"
