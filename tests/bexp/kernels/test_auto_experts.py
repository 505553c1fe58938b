from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bexp.kernels.experts import loop
from bexp.kernels.experts.auto import __main__ as command
from bexp.kernels.experts.auto import auto_experts as auto_module
from bexp.kernels.experts.auto import plans, products
from bexp.kernels.experts.auto.auto_experts import PLANNED, AutoExperts, auto_backend
from bexp.kernels.experts.auto.choice import ByLoad, Times
from bexp.kernels.experts.auto.measuring import FFNShape, GemmShape, apart, measure_ffn, measure_gemm
from bexp.kernels.experts.auto.products import EVEN, STOCK, Products, gemm_of
from bexp.kernels.experts.auto.table import KernelTable, row_class
from bexp.kernels.experts.expert_backend import ExpertBackend, ExpertFFN
from bexp.kernels.experts.registry import expert_backend
from bexp.kernels.experts.rows import Rows
from bexp.kernels.shapes import ExpertsShape
from tests.bexp.kernels import expert_cases
from tests.bexp.kernels.auto_tables import CPU, FASTER, GEMM, OTHER, SLOWER, FakeTimer, never, seconds

pytestmark = pytest.mark.usefixtures("tables")


def test_a_measurement_sees_nothing_of_its_caller() -> None:
    before = torch.get_rng_state()

    def measure() -> tuple[bool, bool]:
        assert expert_backend(STOCK).unsupported_reason(experts_shape(), CPU) is None
        measure_gemm(GEMM, 8, [STOCK], CPU, FakeTimer({}))
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def pack(tensor: Tensor) -> Tensor:
        raise AssertionError("the graph of a measurement is not the caller's")

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.no_grad(), torch.autocast("cpu"), hooks:
        assert apart(measure, CPU) == (True, False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products of a second back end that were called; its numbers are those of the loop."""
    names: list[str] = []

    def multiply(x: Tensor, w: Tensor, ends: Tensor, /, *, transposed: bool = False) -> Tensor:
        names.append("multiply")
        return loop.grouped_gemm(x, w.mT if transposed else w, _counted(ends))

    def add_up(x: Tensor, grad: Tensor, ends: Tensor, /) -> Tensor:
        names.append("add_up")
        parts = zip(x.split(_counted(ends).counts), grad.split(_counted(ends).counts), strict=True)
        return torch.stack([a.t() @ b for a, b in parts])

    def gemm(x_RK: Tensor, w_EKN: Tensor, rows: Rows) -> Tensor:
        names.append("gemm")
        return loop.grouped_gemm(x_RK, w_EKN, _counted(rows.ends))

    monkeypatch.setitem(products.KERNELS, OTHER, Products(multiply, add_up, gemm))
    return names


def _counted(ends: Tensor) -> Rows:
    last = ends.tolist()
    return Rows(ends, ends, ends, tuple(b - a for a, b in zip([0, *last[:-1]], last, strict=True)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (f"{OTHER}+{STOCK}+{STOCK}", ["multiply"]),
        (f"{STOCK}+{OTHER}+{STOCK}", ["multiply"]),
        (f"{STOCK}+{STOCK}+{OTHER}", ["add_up"]),
        (OTHER, ["gemm"]),
        (STOCK, []),
    ],
)
def test_each_product_comes_from_the_kernel_that_the_plan_names(
    plan: str, expected: list[str], transposed: bool, called: list[str]
) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([8, 8, 24, 40], dtype=torch.int32)
    stored = torch.randn((4, 16, 32) if transposed else (4, 32, 16)).bfloat16()
    x, grad = torch.randn(40, 32).bfloat16(), torch.randn(40, 16).bfloat16()
    found = []
    for gemm in (gemm_of(plan), gemm_of(STOCK)):
        assert gemm is not None
        a, b = x.clone().requires_grad_(), stored.clone().requires_grad_()
        out = gemm(a, b.mT if transposed else b, Rows(ends, ends, ends))
        out.backward(grad)
        found.append((out, a.grad, b.grad))
        if len(found) == 1:
            assert called == expected
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("plan", [EVEN, f"{EVEN}+{STOCK}+{STOCK}", f"{STOCK}+{EVEN}+{EVEN}"])
def test_even_rows_are_multiplied_in_one_batch(plan: str, transposed: bool) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    stored = torch.randn((4, 16, 32) if transposed else (4, 32, 16)).bfloat16()
    x, grad = torch.randn(32, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    found = []
    for gemm in (gemm_of(plan), loop.grouped_gemm):
        assert gemm is not None
        a, b = x.clone().requires_grad_(), stored.clone().requires_grad_()
        out = gemm(a, b.mT if transposed else b, _counted(ends))
        out.backward(grad)
        found.append((out, a.grad, b.grad))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("counts", "is_known", "names"),
    [
        ((8, 8, 8, 8), True, {STOCK, EVEN, OTHER}),
        ((8, 8, 8, 8), False, set()),
        ((8, 8, 0, 16), True, {STOCK, OTHER}),
        ((), True, {STOCK, OTHER}),
    ],
    ids=["even", "even and not measured", "uneven", "unknown to the host"],
)
def test_a_batched_product_is_a_plan_where_the_host_knows_that_rows_are_even(
    counts: tuple[int, ...], is_known: bool, names: set[str], called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_known:
        monkeypatch.setenv("BEXP_MEASURE_EXPERTS", "1")
    timer = FakeTimer({})
    monkeypatch.setattr(plans, "measure_gemm", partial(measure_gemm, timer=timer))
    gemms = experts_with_another().gemms
    gemms.backends = {**gemms.backends, EVEN: expert_backend(EVEN)}
    ends = torch.tensor([8, 16, 16 if counts == (8, 8, 0, 16) else 24, 32], dtype=torch.int32)
    x, w = torch.randn(32, 32).bfloat16(), torch.randn(4, 32, 16).bfloat16()
    rows = Rows(ends, ends, ends, counts)
    torch.testing.assert_close(gemms(x, w, rows), loop.grouped_gemm(x, w, _counted(ends)), rtol=2e-2, atol=2e-2)
    assert {name for names_of_a_turn in timer.names for name in names_of_a_turn} == names


@pytest.mark.parametrize(("num_rows", "measured"), [(23, 24), (1, 4)])
def test_even_rows_are_measured_at_a_number_that_divides(num_rows: int, measured: int) -> None:
    shapes: list[torch.Size] = []

    def timer(runs: Mapping[str, Callable[[], object]], *_: object) -> dict[str, Times]:
        for run in runs.values():
            found = run()
            shapes.extend([found.shape] if isinstance(found, Tensor) else [])
        return FakeTimer({})(runs, CPU, None)

    found = measure_gemm(replace(GEMM, even=True), num_rows, [STOCK, EVEN], CPU, timer)
    assert found["uniform"].keys() == {STOCK, EVEN}
    assert {size[0] for size in shapes if len(size) == 2} == {measured}


def test_even_rows_that_cannot_be_measured_take_the_plan_of_any_rows(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(shape: GemmShape, *_: object) -> ByLoad:
        if shape.even:
            raise torch.OutOfMemoryError("out of memory")
        return FASTER

    monkeypatch.setattr(plans, "measure_gemm", measure)
    assert experts_with_another().gemms.plan(replace(GEMM, even=True), 32, CPU, may=True) == OTHER
    assert not called


def test_a_plan_of_a_back_end_that_is_not_here_is_none() -> None:
    assert gemm_of("of_a_later_version") is None
    assert gemm_of(f"{STOCK}+{STOCK}") is None


def experts_with_another(**more: Any) -> AutoExperts:
    """torch's grouped_mm and another back end whose bits are those of the loop."""
    other = ExpertBackend(OTHER, False, lambda shape, device: None, loop.LOOP.forward, **more)
    backend, experts = auto_backend((expert_backend(STOCK), loop.LOOP, other))
    assert backend.only_when_named
    assert backend.forward == experts.forward
    return experts


def ffn_shape(case: expert_cases.ExpertCase) -> FFNShape:
    return FFNShape(case.num_experts, case.top_k, case.hidden, case.width, True, torch.bfloat16)


def test_the_shared_ffn_takes_its_gemms_from_the_plans(called: list[str]) -> None:
    case = expert_cases.CASES[0]
    routes, _ = expert_cases.problem(case, torch.bfloat16, CPU)
    shape, table, number = ffn_shape(case), plans.table_of(CPU), row_class(routes.numel())
    table.write(shape.key, number, seconds({STOCK: 2.0, PLANNED: 1.0}, {STOCK: 2.0, PLANNED: 1.0}))
    table.write(shape.gemms()[1].key, number, FASTER)
    experts = experts_with_another()
    auto = ExpertBackend("auto", False, experts.check, experts.forward)
    errors = expert_cases.errors(auto, case, torch.bfloat16, CPU)
    assert called == ["gemm"], "the second product alone"
    assert max(errors.values()) <= 2e-2, errors


def test_the_first_use_measures_every_back_end_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_MEASURE_EXPERTS", "1")
    timer = FakeTimer({OTHER: (0.5, 0.5)})
    monkeypatch.setattr(auto_module, "measure_ffn", partial(measure_ffn, timer=timer))
    case = expert_cases.CASES[0]
    routes, tensors = expert_cases.problem(case, torch.bfloat16, CPU)
    experts = experts_with_another()
    auto = ExpertBackend("auto", False, experts.check, experts.forward)
    for _ in range(2):
        expert_cases.run(auto, case, routes, tensors)
    assert timer.names == [(STOCK, OTHER)] * 2, "under two loads, once"
    assert KernelTable.of_device(CPU).plan(ffn_shape(case).key, routes.numel(), STOCK) == OTHER


def test_a_graph_takes_the_choice_with_it_and_only_what_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_MEASURE_EXPERTS", "1")
    monkeypatch.setattr(plans, "apart", never)

    def adds(number: int) -> ExpertFFN:
        return lambda x, routes, weights, w_in, w_out, activation: x + number

    table = plans.table_of(CPU)
    shape = FFNShape(4, 1, 32, 16, True, torch.bfloat16)
    table.write(shape.key, row_class(16), FASTER)
    table.write(shape.key, row_class(256), SLOWER)
    w_in, w_out = torch.randn(4, 32, 32).bfloat16(), torch.randn(4, 16, 32).bfloat16()

    def chosen(traceable: frozenset[torch.dtype], tokens: int) -> bool:
        stock = ExpertBackend(STOCK, True, lambda *_: None, adds(0), frozenset({torch.bfloat16}))
        other = ExpertBackend(OTHER, False, lambda *_: None, adds(1), traceable)
        x, routes = torch.randn(tokens, 32).bfloat16(), torch.zeros(tokens, 1, dtype=torch.int64)
        compiled = torch.compile(auto_backend((stock, other))[1].forward, backend="eager", fullgraph=True)
        return torch.equal(compiled(x, routes, torch.ones(tokens, 1).bfloat16(), w_in, w_out, "silu"), x + 1)

    found = [chosen(frozenset({torch.bfloat16}), tokens) for tokens in (16, 20, 256, 300)]
    assert found == [True, True, False, False]
    assert not chosen(frozenset(), 16)


def test_a_command_measures_a_layer_beforehand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = experts_with_another()
    monkeypatch.setattr(command, "AUTO_EXPERTS", experts)
    monkeypatch.setattr(command, "AUTO", ExpertBackend("auto", False, experts.check, experts.forward))
    monkeypatch.setattr(auto_module, "measure_ffn", partial(measure_ffn, timer=FakeTimer({OTHER: (0.5, 0.5)})))
    sizes = ["--num-experts", "4", "--top-k", "2", "--hidden-size", "32", "--ffn-hidden-size", "16", "--device", "cpu"]
    assert command.main([*sizes, "--tokens", "8", "16"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:2] == ["8 tokens: other", "16 tokens: other"]
    assert str(plans.table_of(CPU).path) in printed
    assert KernelTable.of_device(CPU).plan(FFNShape(4, 2, 32, 16, True, torch.bfloat16).key, 16, STOCK) == OTHER
    monkeypatch.setattr(command, "AUTO", expert_backend("auto"))
    assert command.main([*sizes, "--tokens", "8"]) == 1
    assert "nothing to choose from" in capsys.readouterr().err


def test_there_must_be_a_choice_that_does_not_wait() -> None:
    reason = expert_backend("auto").check(experts_shape(), CPU)
    assert reason is not None
    assert "nothing to choose from" in reason
    assert experts_with_another().check(experts_shape(), CPU) is None
    assert experts_with_another(waits=True).check(experts_shape(), CPU) == reason
    assert "multiple of 8" in str(experts_with_another().check(experts_shape(hidden=60), CPU))


def experts_shape(hidden: int = 64) -> ExpertsShape:
    return ExpertsShape(hidden_size=hidden, ffn_hidden_size=32, num_experts=4, top_k=1, dtype=torch.bfloat16)
