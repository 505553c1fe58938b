"""The expert back end `auto` on a CUDA device: what it measures, what it runs, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bexp.kernels.experts.auto import plans
from bexp.kernels.experts.auto.measuring import FFNShape, GemmShape
from bexp.kernels.experts.auto.products import EVEN, KERNELS, PRODUCTS, STOCK, gemm_of, mixed
from bexp.kernels.experts.auto.table import row_class
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.registry import expert_backend, expert_support
from bexp.kernels.experts.rows import Rows
from bexp.kernels.shapes import ExpertsShape
from tests.bexp.kernels import expert_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CASE = expert_cases.ExpertCase("auto", 512, 8, 2, hidden=128, width=64)


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables of this test alone, and a back end that has chosen nothing yet."""
    monkeypatch.setenv("BEXP_EXPERT_TABLES", str(tmp_path))
    monkeypatch.setenv("BEXP_MEASURE_EXPERTS", "1")
    plans.read_table.cache_clear()
    yield
    plans.read_table.cache_clear()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def fresh() -> ExpertBackend:
    from bexp.kernels.experts.auto.auto_experts import auto_backend

    names = [each.name for each in expert_support(experts_shape(), device()) if each.name != "auto"]
    return auto_backend(expert_backend(name) for name in names)[0]


def experts_shape() -> ExpertsShape:
    return ExpertsShape(CASE.hidden, CASE.width, CASE.num_experts, CASE.top_k, torch.bfloat16)


def test_the_first_use_measures_and_runs_what_was_fastest() -> None:
    auto = fresh()
    assert auto.unsupported_reason(experts_shape(), device()) is None
    routes, tensors = expert_cases.problem(CASE, torch.bfloat16, device())
    torch.manual_seed(0)
    before = torch.cuda.get_rng_state()
    results = expert_cases.run(auto, CASE, routes, tensors)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    shape = FFNShape(CASE.num_experts, CASE.top_k, CASE.hidden, CASE.width, True, torch.bfloat16)
    table = plans.table_of(device())
    seconds = table.seconds(shape.key, row_class(routes.numel()))
    assert all({STOCK, "fused"} <= times.keys() for times in seconds.values())
    assert not any({"loop", "bmm"} & times.keys() for times in seconds.values()), "they wait"
    found = [each for times in seconds.values() for each in times.values()]
    assert all(each.clock.median > 0 and each.device.median > 0 for each in found)
    chosen = table.plan(shape.key, routes.numel(), STOCK)
    if chosen in {each.name for each in expert_support(experts_shape(), device())}:
        wanted = expert_cases.run(expert_backend(chosen), CASE, routes, tensors)
        assert all(torch.equal(mine, other) for mine, other in zip(results, wanted, strict=True))
    errors = expert_cases.errors(auto, CASE, torch.bfloat16, device())
    assert max(errors.values()) <= 2e-2, errors


def test_it_is_captured_and_nothing_is_measured_in_a_capture() -> None:
    auto = fresh()
    routes, tensors = expert_cases.problem(CASE, torch.bfloat16, device())
    x, weights, w_in, w_out = tensors[:4]
    wanted = auto.forward(x, routes, weights, w_in, w_out, "silu")
    few = routes[:100], x[:100], weights[:100]
    expert_backend(STOCK).forward(
        few[1], few[0], few[2], w_in, w_out, "silu"
    )  # its workspace exists before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        known = auto.forward(x, routes, weights, w_in, w_out, "silu")
        unknown = auto.forward(few[1], few[0], few[2], w_in, w_out, "silu")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(known, wanted)
    assert torch.isfinite(unknown).all()
    shape = FFNShape(CASE.num_experts, CASE.top_k, CASE.hidden, CASE.width, True, torch.bfloat16)
    assert not plans.table_of(device()).has(shape.key, row_class(few[0].numel()))


@pytest.mark.parametrize("counts", [(64, 0, 136, 100), (75, 75, 75, 75)], ids=["uneven", "even"])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_different_back_ends_make_one_gemm(transposed: bool, counts: tuple[int, ...]) -> None:
    shape = GemmShape(4, 128, 64, torch.bfloat16, transposed)
    like = ExpertsShape(shape.k, shape.n, shape.num_experts, 1, shape.dtype, gated=False)
    able = {each.name for each in expert_support(like, device()) if each.usable} & KERNELS.keys()
    if len(set(counts)) > 1:
        able -= {EVEN}
    torch.manual_seed(0)
    ends = torch.tensor(counts, device=device()).cumsum(0).to(torch.int32)
    rows = Rows(ends, ends, ends)
    x, grad = (torch.randn(300, columns, device=device()).bfloat16() for columns in (shape.k, shape.n))
    stored = torch.randn(4, *((shape.n, shape.k) if transposed else (shape.k, shape.n)), device=device()).bfloat16()
    wanted = None
    for other in (STOCK, *sorted(able - {STOCK})):
        for number in range(len(PRODUCTS)):
            names = [STOCK] * len(PRODUCTS)
            names[number] = other
            gemm = gemm_of(mixed(*names))
            assert gemm is not None
            a, b = x.clone().requires_grad_(), stored.clone().requires_grad_()
            out = gemm(a, b.mT if transposed else b, rows)
            out.backward(grad)
            assert a.grad is not None
            assert b.grad is not None
            found = (out.detach(), a.grad, b.grad)
            wanted = wanted or found
            for mine, stock in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, stock, rtol=2e-2, atol=2e-1)
