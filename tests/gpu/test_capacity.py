"""Experts with a capacity on a GPU: every back end drops the same pairs and agrees on what is left."""

from __future__ import annotations

import pytest
import torch

from bexp.kernels.experts.capacity import ExpertsWithCapacity
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.registry import expert_backend
from bexp.kernels.shapes import ExpertsShape
from tests.bexp.kernels import expert_cases, references
from tests.gpu.needs import one_gpu

pytestmark = one_gpu()

CUDA = torch.device("cuda")
CASE = expert_cases.ExpertCase("large", 4096, 64, 8, hidden=512, width=256, skew=1.0)
CAPACITY = 512


def run(name: str) -> list[torch.Tensor]:
    routes, tensors = expert_cases.problem(CASE, torch.bfloat16, CUDA)
    experts = ExpertsWithCapacity(expert_backend(name).forward, lambda num_tokens: CAPACITY)
    return expert_cases.run(ExpertBackend(name, False, lambda *_: None, experts), CASE, routes, tensors)


@pytest.mark.parametrize("name", ["grouped_mm", "bmm", "hopper_grouped", "fused"])
def test_back_ends_agree_on_the_pairs_that_are_left(name: str) -> None:
    shape = ExpertsShape(CASE.hidden, CASE.width, CASE.num_experts, CASE.top_k, torch.bfloat16)
    reason = expert_backend(name).unsupported_reason(shape, CUDA)
    if reason is not None:
        pytest.skip(reason)
    found, wanted = run(name), run("loop")
    errors = [references.relative_error(one, other) for one, other in zip(found, wanted, strict=True)]
    assert max(errors) <= 2e-2, errors
