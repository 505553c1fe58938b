"""The experts on quack's GEMMs, with the GEMMs in plain torch; tests/gpu/test_quack.py runs quack's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import torch

from benchmarks.contenders import quack_gemms as gemms
from benchmarks.contenders.quack_experts import QUACK
from bexp.kernels.selective_recompute import selective_recompute
from tests.benchmarks.contenders import quack_stand_in
from tests.bexp.kernels import expert_cases, references
from tests.bexp.kernels.test_experts import experts_shape

CPU = torch.device("cpu")
CASES = tuple(case for case in expert_cases.CASES if case.gated and case.activation != "gelu")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in quack_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_and_gradients(case: expert_cases.ExpertCase) -> None:
    errors = expert_cases.errors(QUACK, case, torch.float32, CPU)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("in_transposed", [True, False])
@pytest.mark.parametrize("out_transposed", [True, False])
def test_gradients_lie_as_the_weights_do(in_transposed: bool, out_transposed: bool) -> None:
    case = expert_cases.ExpertCase("one expert without rows", 23, 5, 2, hidden=40, width=24, skew=1.0)
    routes, (x, weights, w_in, w_out, grad) = expert_cases.problem(case, torch.float32, CPU)
    lying = [x, weights, expert_cases.transposed_storage(w_in, in_transposed)]
    lying += [expert_cases.transposed_storage(w_out, out_transposed), grad]
    found = expert_cases.run(QUACK, case, routes, lying)
    for actual, wanted in zip(found, expert_cases.expected(case, routes, lying), strict=True):
        assert references.relative_error(actual, wanted) <= 1e-5
    assert [found[3].stride(), found[4].stride()] == [lying[2].stride(), lying[3].stride()]


def test_weights_that_lie_as_the_kernels_want_are_not_copied() -> None:
    """Nothing is kept beside the inputs but the pre-activations, and eight bytes and the experts' bounds."""
    case = expert_cases.ExpertCase("kept", 64, 4, 2)
    routes, tensors = expert_cases.problem(case, torch.float32, CPU)
    x, weights, w_in, w_out = inputs = references.leaves(tensors[:4], torch.float32)
    inputs[2] = w_in = expert_cases.transposed_storage(w_in.detach()).requires_grad_()
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        QUACK.forward(x, routes, weights, w_in, w_out, "silu")
    pairs = case.num_tokens * case.top_k
    assert sum(kept.values()) == pairs * (2 * case.width * 4 + 8) + 4 * (case.num_experts + 1)


def test_pre_activations_can_be_computed_again() -> None:
    case = expert_cases.CASES[0]
    routes, tensors = expert_cases.problem(case, torch.float32, CPU)
    wanted = expert_cases.run(QUACK, case, routes, tensors)
    with selective_recompute(products=True):
        found = expert_cases.run(QUACK, case, routes, tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("above", [0, 1])
def test_sums_over_many_rows_have_a_larger_tile(above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = expert_cases.CASES[0]
    rows_an_expert = case.num_tokens * case.top_k // case.num_experts
    monkeypatch.setattr(gemms, "_MANY_ROWS", rows_an_expert + above)
    monkeypatch.setattr(quack_stand_in.Tuned, "tiles", [])
    errors = expert_cases.errors(QUACK, case, torch.float32, CPU)
    assert max(errors.values()) <= 1e-5, errors
    larger = None if above else quack_stand_in.GemmConfig(128, 256, 2, pingpong=False, is_dynamic_persistent=False)
    assert quack_stand_in.Tuned.tiles == [larger, larger]
    assert gemms._tile(256, pingpong=False) is gemms._tile(256, pingpong=False)


def test_only_the_gradients_that_are_needed() -> None:
    case = expert_cases.CASES[0]
    routes, (x, weights, w_in, w_out, _) = expert_cases.problem(case, torch.float32, CPU)
    x.requires_grad_()
    QUACK.forward(x, routes, weights, w_in, w_out, "silu").sum().backward()
    assert x.grad is not None
    assert w_in.grad is None
    assert QUACK.forward(x[:0], routes[:0], weights[:0], w_in, w_out, "silu").shape == (0, case.hidden)


def test_what_is_refused_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = experts_shape()
    cuda = torch.device("cuda")
    for refused, part in (
        (replace(shape, gated=False), "plain silu"),
        (replace(shape, activation="gelu"), "gated gelu"),
        (experts_shape(dtype=torch.float32), "float32"),
        (experts_shape(width=36), "multiple of 8, not 36"),
    ):
        assert part in (QUACK.unsupported_reason(refused, cuda) or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wanted = "quack-kernels is not installed: pip install 'quack-kernels>=0.6.5,<0.7' 'apache-tvm-ffi<0.2'"
    assert QUACK.unsupported_reason(shape, cuda) == wanted
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.9")
    assert "0.6, not 0.5.9" in (QUACK.unsupported_reason(shape, cuda) or "")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.5")
    assert "CUDA device" in (QUACK.unsupported_reason(shape, CPU) or "")
