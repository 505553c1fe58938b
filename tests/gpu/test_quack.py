"""The experts on quack's own kernels, on a Hopper GPU with quack-kernels installed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.contenders.quack_experts import QUACK
from tests.bexp.kernels import expert_cases, references
from tests.bexp.kernels.poison import poisoned_memory
from tests.gpu.test_fused import expected
from tests.gpu.test_kernels import experts_shape

CUDA = torch.device("cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
if torch.cuda.is_available() and (REASON := QUACK.unsupported_reason(experts_shape(), CUDA)) is not None:
    pytestmark.append(pytest.mark.skip(reason=REASON))

TOLERANCE = 1e-2
CASES = (
    expert_cases.ExpertCase("empty experts", 24, 32, 3, hidden=64, width=48, skew=2.0),
    expert_cases.ExpertCase("many experts", 4096, 512, 2, hidden=256, width=128, skew=1.0),
    expert_cases.ExpertCase("long rows", 2000, 16, 4, hidden=512, width=384, skew=1.0),
    expert_cases.ExpertCase("rows for the larger tile", 12000, 2, 2, hidden=256, width=136, skew=1.0),
    expert_cases.ExpertCase("one takes all", 3001, 8, 1, hidden=512, width=256, one_takes_all=True),
    expert_cases.ExpertCase("every expert for every token", 513, 8, 8, hidden=256, width=192),
    expert_cases.ExpertCase("odd widths", 1111, 4, 2, hidden=200, width=136, activation="relu"),
    expert_cases.ExpertCase("one token", 1, 8, 2, hidden=64, width=48),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("transposed", [True, False])
def test_output_and_gradients(case: expert_cases.ExpertCase, transposed: bool) -> None:
    routes, (x, weights, *matrices, grad) = expert_cases.problem(case, torch.bfloat16, CUDA)
    lying = [x, weights, *(expert_cases.transposed_storage(w, transposed) for w in matrices), grad]
    with poisoned_memory():
        found = expert_cases.run(QUACK, case, routes, lying)
    for actual, wanted in zip(found, expected(case, routes, lying), strict=True):
        assert references.relative_error(actual, wanted) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits() -> None:
    case = CASES[2]
    routes, tensors = expert_cases.problem(case, torch.bfloat16, CUDA)
    expert_cases.run(QUACK, case, routes, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = expert_cases.run(QUACK, case, routes, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again = expert_cases.run(QUACK, case, routes, tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
