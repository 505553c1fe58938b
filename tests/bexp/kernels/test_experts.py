from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.registry import default_expert_backend, expert_backend, expert_support
from bexp.kernels.shapes import ExpertsShape
from tests.bexp.kernels import expert_cases

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
