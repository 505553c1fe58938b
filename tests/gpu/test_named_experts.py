"""Expert back ends that a request has to name, on a CUDA device; those of packages where these are installed."""

from __future__ import annotations

import pytest
import torch

from bexp.explorer.model.expert_kernels import EXPERT_KERNELS
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.registry import expert_backend
from bexp.kernels.shapes import ExpertsShape
from tests.bexp.kernels import expert_cases, references
from tests.bexp.kernels.poison import poisoned_memory
from tests.gpu.needs import one_gpu

pytestmark = [
    *one_gpu(),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of CuTe DSL, when sonic-moe is imported
]

CUDA = torch.device("cuda")
NAMES = tuple(kernel.name for kernel in EXPERT_KERNELS if not kernel.is_explored)
CASES = (
    expert_cases.ExpertCase("uneven with empty experts", 200, 32, 3, hidden=256, width=128, skew=2.0),
    expert_cases.ExpertCase("long rows", 2000, 16, 4, hidden=512, width=384, skew=1.0),
    expert_cases.ExpertCase("one takes all", 1001, 8, 1, hidden=512, width=256, one_takes_all=True),
    expert_cases.ExpertCase("every expert for every token", 513, 8, 8, hidden=256, width=128),
    expert_cases.ExpertCase("one token", 1, 8, 2, hidden=256, width=128),
    expert_cases.ExpertCase("plain gelu", 300, 8, 2, hidden=256, width=128, activation="gelu", gated=False),
)
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}


def supported(name: str, case: expert_cases.ExpertCase, dtype: torch.dtype) -> ExpertBackend:
    backend = expert_backend(name)
    shape = ExpertsShape(
        case.hidden, case.width, case.num_experts, case.top_k, dtype, gated=case.gated, activation=case.activation
    )
    reason = backend.unsupported_reason(shape, CUDA)
    if reason is not None:
        pytest.skip(reason)
    return backend


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", NAMES)
def test_output_and_gradients(name: str, case: expert_cases.ExpertCase, dtype: torch.dtype, transposed: bool) -> None:
    backend = supported(name, case, dtype)
    routes, (x, weights, *matrices, grad) = expert_cases.problem(case, dtype, CUDA)
    tensors = [x, weights, *(expert_cases.transposed_storage(w, transposed) for w in matrices), grad]
    with poisoned_memory(warn_only=True):
        found = expert_cases.run(backend, case, routes, tensors)
    wanted = expert_cases.expected(case, routes, tensors, CUDA)
    errors = [references.relative_error(one, other) for one, other in zip(found, wanted, strict=True)]
    assert max(errors) <= TOLERANCES[dtype], errors
