from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bexp.explorer.model.expert_kernels import EXPERT_KERNELS, NAMED_EXPERTS
from bexp.explorer.model.hardware import NAME_IT
from bexp.kernels.activations import Activation, activate
from bexp.kernels.experts.capacity import ExpertsWithCapacity, keep_pairs
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.registry import default_expert_backend, expert_backend, expert_support
from bexp.kernels.shapes import ExpertsShape
from tests.bexp.kernels import expert_cases, references

CPU = torch.device("cpu")
NAMES = ("loop", "grouped_mm", "bmm")


def experts_shape(
    hidden: int = 64, width: int = 32, experts: int = 4, dtype: torch.dtype = torch.bfloat16
) -> ExpertsShape:
    return ExpertsShape(hidden_size=hidden, ffn_hidden_size=width, num_experts=experts, top_k=1, dtype=dtype)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> ExpertBackend:
    return expert_backend(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
def test_output_and_gradients(backend: ExpertBackend, case: expert_cases.ExpertCase, dtype: torch.dtype) -> None:
    """In bfloat16, values are rounded to 8 bits between the operations, and errors of 2^-9 add up along a chain."""
    errors = expert_cases.errors(backend, case, dtype, CPU)
    assert errors["out"] <= (1e-5 if dtype is torch.float32 else 1e-2), errors
    assert max(errors.values()) <= (1e-5 if dtype is torch.float32 else 2e-2), errors


def test_support_names_the_rule_that_is_broken() -> None:
    support = {s.name: s for s in expert_support(experts_shape(hidden=20, width=32), CPU)}
    assert support["loop"].usable
    assert support["bmm"].usable
    assert not support["grouped_mm"].usable
    assert support["grouped_mm"].reason == "grouped_mm needs hidden_size to be a multiple of 8 in bfloat16, not 20"
    assert default_expert_backend(experts_shape(hidden=20), CPU) == "loop"
    assert default_expert_backend(experts_shape(), CPU) == "grouped_mm"
    for s in expert_support(experts_shape(), CPU):
        assert s.stock == (s.name in NAMES)
        assert (s.reason == NAME_IT) == (s.name in NAMED_EXPERTS)
        assert s.usable == s.stock
        assert (s.reason is None) == s.usable


def test_a_back_end_refuses_an_activation_that_no_kernel_knows() -> None:
    for found in expert_support(replace(experts_shape(), activation="xielu"), CPU, named=NAMED_EXPERTS):
        assert found.reason == f"{found.name} knows the activations silu, gelu, relu, not xielu"
        assert not found.usable


def test_a_back_end_that_must_be_named_is_tried_if_it_is() -> None:
    found = {s.name: s.reason for s in expert_support(experts_shape(width=96), CPU, named=["block_sparse"])}
    assert found["block_sparse"] == "block_sparse needs expert_ffn_hidden_size to be a multiple of 128, not 96"
    assert found["cublas_grouped"] == NAME_IT


def test_each_back_end_has_its_name_and_its_reason_on_a_cpu() -> None:
    for kernel in EXPERT_KERNELS:
        backend = expert_backend(kernel.name)
        assert backend.name == kernel.name
        assert not (kernel.waits and backend.traceable_dtypes), "no graph contains what waits"
        assert (backend.unsupported_reason(experts_shape(width=128), CPU) is None) == backend.stock


def test_a_token_cannot_go_to_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"top_k \(2\) must not exceed num_experts \(1\)"):
        ExpertsShape(hidden_size=8, ffn_hidden_size=8, num_experts=1, top_k=2, dtype=torch.float32)


def test_an_unknown_back_end_is_named_beside_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"^unknown expert back end 'auto'; there are grouped_mm, loop, bmm, "):
        expert_backend("auto")


CASES = {case.name: case for case in expert_cases.CASES}


def test_an_expert_keeps_its_heaviest_pairs_and_the_earlier_of_equal_ones() -> None:
    routes = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1]])
    weights = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.8, 0.2], [0.2, 0.8]])
    kept = keep_pairs(routes, weights, 4, 2)
    assert kept.is_kept.view(4, 2).tolist() == [[True, True], [True, True], [True, False], [False, False]]
    assert kept.pair_of_row.tolist() == [0, 1, 2, 3, 4]
    assert kept.row_of_pair[kept.is_kept].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "bmm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        ("uniform", 5),
        ("skewed with empty experts", 4),
        ("one expert takes all", 3),
        ("every expert for every token", 12),
        ("one token", 1),
        ("plain gelu", 1),
    ],
)
def test_output_and_gradients_with_a_capacity(backend: str, dtype: torch.dtype, name: str, capacity: int) -> None:
    case = CASES[name]
    routes, tensors = expert_cases.problem(case, dtype, CPU)
    x, weights, w_in, w_out = inputs = references.leaves(tensors[:4], dtype)
    experts = ExpertsWithCapacity(expert_backend(backend).forward, lambda num_tokens: capacity)
    out = experts(x, routes, weights, w_in, w_out, case.activation)
    out.backward(tensors[4])

    x64, weights64, w_in64, w_out64 = wanted = references.leaves(tensors[:4])
    kept = references.kept_pairs(routes, weights64, capacity)
    out64 = references.experts(x64, routes, weights64 * kept, w_in64, w_out64, case.activation)
    out64.backward(tensors[4].double())
    found = [(out, out64), *((one.grad, other.grad) for one, other in zip(inputs, wanted, strict=True))]
    errors = [references.relative_error(actual, expected) for actual, expected in found]
    assert max(errors) <= (1e-5 if dtype is torch.float32 else 2e-2), errors


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_value_and_gradients(name: Activation, gated: bool, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(7, 12, generator=generator), torch.rand(7, generator=generator)
    x, weights = references.leaves(data, torch.float32)
    x64, weights64 = references.leaves(data)
    out = activate(x, name, gated=gated, row_weights=weights if weighted else None)
    wanted = references.activation(x64, name, gated) * (weights64[:, None] if weighted else 1)
    gradient = torch.randn(out.shape, generator=generator)
    out.backward(gradient)
    wanted.backward(gradient.double())
    assert references.relative_error(out, wanted) <= 1e-6
    assert references.relative_error(x.grad, x64.grad) <= 1e-6
    if weighted:
        assert references.relative_error(weights.grad, weights64.grad) <= 1e-6
