from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.registry import default_expert_backend, expert_backend, expert_support
from bexp.kernels.experts.rows import combine, dispatch, padded_rows, sorted_rows
from bexp.kernels.shapes import ExpertsShape
from tests.bexp.kernels import expert_cases
from tests.bexp.kernels.references import assert_same_values

CPU = torch.device("cpu")
NAMES = ("loop", "grouped_mm", "bmm")


def experts_shape(
    hidden: int = 64, width: int = 32, experts: int = 4, dtype: torch.dtype = torch.bfloat16
) -> ExpertsShape:
    return ExpertsShape(hidden_size=hidden, ffn_hidden_size=width, num_experts=experts, top_k=1, dtype=dtype)


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> ExpertBackend:
    return expert_backend(request.param)


@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
def test_output_and_gradients_in_float32(backend: ExpertBackend, case: expert_cases.ExpertCase) -> None:
    errors = expert_cases.errors(backend, case, torch.float32, CPU)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
def test_output_and_gradients_in_bfloat16(backend: ExpertBackend, case: expert_cases.ExpertCase) -> None:
    """Intermediate values are rounded to 8 bits between the operations, so that errors of 2^-9 add up along a chain."""
    errors = expert_cases.errors(backend, case, torch.bfloat16, CPU)
    assert errors["out"] <= 1e-2, errors
    assert max(errors.values()) <= 2e-2, errors


def test_a_second_run_gives_what_the_first_gave(backend: ExpertBackend) -> None:
    case = expert_cases.CASES[1]
    routes, tensors = expert_cases.problem(case, torch.float32, CPU)
    first, second = (expert_cases.run(backend, case, routes, tensors) for _ in range(2))
    assert_same_values(second, first)


def test_padded_rows_have_the_capacity_of_the_largest_expert() -> None:
    routes = torch.tensor([[0], [2], [0], [0]])
    rows, capacity = padded_rows(routes, 3)
    assert capacity == 3
    assert rows.row_of_pair.tolist() == [0, 6, 1, 2]
    assert rows.token_of_row.tolist() == [0, 2, 3, 0, 0, 0, 1, 0, 0]
    assert rows.ends.tolist() == [3, 6, 9]


def test_dispatch_and_combine_are_each_others_transpose() -> None:
    generator = torch.Generator().manual_seed(1)
    routes = torch.rand(9, 5, generator=generator).topk(3, dim=-1).indices
    rows = sorted_rows(routes, 5, count=False)
    x = torch.randn(9, 4, generator=generator)
    y = torch.randn(27, 4, generator=generator)
    x_rows, _ = dispatch(x, torch.ones(9, 3), rows)
    torch.testing.assert_close((x_rows * y).sum(), (x * combine(y, rows, 3)).sum())


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
        assert s.usable == s.stock
        assert (s.reason is None) == s.usable


def test_a_back_end_refuses_an_activation_that_no_kernel_knows() -> None:
    for found in expert_support(replace(experts_shape(), activation="xielu"), CPU):
        assert found.reason == f"{found.name} knows the activations silu, gelu, relu, not xielu"
        assert not found.usable


def test_a_token_cannot_go_to_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"top_k \(2\) must not exceed num_experts \(1\)"):
        ExpertsShape(hidden_size=8, ffn_hidden_size=8, num_experts=1, top_k=2, dtype=torch.float32)


def test_an_unknown_back_end_is_named_beside_those_that_exist() -> None:
    told = "unknown expert back end 'auto'; there are grouped_mm, loop, bmm, hopper_grouped, fused"
    with pytest.raises(ValueError, match=f"^{told}$"):
        expert_backend("auto")
