"""Experts with a capacity: which pairs are dropped, and output and gradients against a float64 reference."""

from __future__ import annotations

import pytest
import torch

from bexp.kernels.experts.capacity import ExpertsWithCapacity, keep_pairs
from bexp.kernels.experts.registry import expert_backend
from tests.bexp.kernels import expert_cases, references

CPU = torch.device("cpu")
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
def test_output_and_gradients(backend: str, dtype: torch.dtype, name: str, capacity: int) -> None:
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
