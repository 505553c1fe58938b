"""The fused experts on a CUDA device: larger shapes, and what a kernel must not do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.fused.fused_experts import FUSED
from bexp.kernels.experts.fused.hopper_support import has_hopper_kernels
from bexp.kernels.launcher import Launch
from tests.bexp.kernels import expert_cases, references
from tests.bexp.kernels.poison import poisoned_memory
from tests.gpu.fused_paths import PATHS, tiles_of
from tests.gpu.needs import one_gpu
from tests.gpu.test_kernels import experts_shape

CUDA = torch.device("cuda")

pytestmark = one_gpu()
if torch.cuda.is_available() and (REASON := FUSED.unsupported_reason(experts_shape(), CUDA)) is not None:
    pytestmark.append(pytest.mark.skip(reason=REASON))

TOLERANCE = 1e-2


def backend(path: str) -> ExpertBackend:
    """The fused experts on that path."""
    from bexp.kernels.experts.fused.function import fused_ffn  # needs Triton

    if path.startswith("hopper") and not has_hopper_kernels(CUDA):
        pytest.skip("no Hopper, or another Gluon")
    return ExpertBackend("fused", False, lambda shape, device: None, partial(fused_ffn, tiles=tiles_of(path)))


LARGE = (
    expert_cases.ExpertCase("many experts", 4096, 512, 2, hidden=256, width=128, skew=1.0),
    expert_cases.ExpertCase("long rows", 2000, 16, 4, hidden=512, width=384, skew=1.0),
    expert_cases.ExpertCase("one takes all", 3001, 8, 1, hidden=512, width=256, one_takes_all=True),
    expert_cases.ExpertCase("every expert for every token", 513, 8, 8, hidden=256, width=192),
    expert_cases.ExpertCase("plain gelu", 5000, 8, 2, hidden=384, width=512, gated=False, activation="gelu"),
    expert_cases.ExpertCase("half a tile of columns", 3000, 4, 1, hidden=256, width=640, skew=1.0),
    expert_cases.ExpertCase("plain, half a tile of columns", 700, 4, 2, hidden=256, width=392, gated=False),
    expert_cases.ExpertCase("many tiles", 20000, 64, 2, hidden=512, width=320, skew=0.5),
    expert_cases.ExpertCase("odd widths", 1111, 4, 2, hidden=200, width=136, activation="relu"),
)


def errors(backend: ExpertBackend, case: expert_cases.ExpertCase, dtype: torch.dtype) -> list[float]:
    """Relative errors of the output and of each gradient."""
    routes, tensors = expert_cases.problem(case, dtype, CUDA)
    with poisoned_memory():
        found = expert_cases.run(backend, case, routes, tensors)
    pairs = zip(found, expert_cases.expected(case, routes, tensors, CUDA), strict=True)
    return [references.relative_error(actual, wanted) for actual, wanted in pairs]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", (*expert_cases.CASES, *LARGE), ids=lambda case: case.name)
def test_output_and_gradients(case: expert_cases.ExpertCase, path: str) -> None:
    found = errors(backend(path), case, torch.bfloat16)
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize("path", ["chosen", "hopper"])
@pytest.mark.parametrize("case", (expert_cases.CASES[1], *LARGE), ids=lambda case: case.name)
def test_output_and_gradients_in_float16(case: expert_cases.ExpertCase, path: str) -> None:
    found = errors(backend(path), case, torch.float16)
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize("num_tokens", [128, 512, 1024, 2048, 8192])
def test_default_tiles_of_every_size(num_tokens: int) -> None:
    case = expert_cases.ExpertCase("size", num_tokens, 16, 2, hidden=256, width=256, skew=1.0)
    found = errors(FUSED, case, torch.bfloat16)
    assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize("path", PATHS)
def test_the_same_inputs_give_the_same_bits(path: str) -> None:
    routes, tensors = expert_cases.problem(LARGE[1], torch.bfloat16, CUDA)
    first, *others = (expert_cases.run(backend(path), LARGE[1], routes, tensors) for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("path", ["chosen", "hopper"])
def test_it_never_waits_for_the_device(path: str) -> None:
    routes, tensors = expert_cases.problem(LARGE[1], torch.bfloat16, CUDA)
    expert_cases.run(backend(path), LARGE[1], routes, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        expert_cases.run(backend(path), LARGE[1], routes, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", [LARGE[1], expert_cases.CASES[0]], ids=lambda case: case.name)
def test_a_captured_graph_computes_the_same(case: expert_cases.ExpertCase) -> None:
    routes, tensors = expert_cases.problem(case, torch.bfloat16, CUDA)
    inputs = [tensor.requires_grad_() for tensor in tensors[:4]]
    x, weights, w_in, w_out = inputs

    def both_ways() -> tuple[Tensor, ...]:
        out = FUSED.forward(x, routes, weights, w_in, w_out, case.activation)
        return (out.detach(), *torch.autograd.grad(out, inputs, tensors[4]))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both_ways()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_ways()
    with torch.no_grad():
        x.mul_(-0.5)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, both_ways(), strict=True))


def test_launches_go_below_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first ones of a shape go through Triton's own launch, wherever the tensors lie later."""
    import triton

    if not triton.__version__.startswith("3.6."):
        pytest.skip("launches are prepared for Triton 3.6")
    case = expert_cases.ExpertCase("prepared", 200, 8, 2, hidden=128, width=64)
    problems = [expert_cases.problem(case, torch.bfloat16, CUDA, seed) for seed in range(3)]
    expert_cases.run(FUSED, case, *problems[0])

    def refuse(self: Launch, tensors: object) -> None:
        raise AssertionError("launched by Triton")

    monkeypatch.setattr(Launch, "by_triton", refuse)
    for routes, tensors in problems[1:]:
        found = expert_cases.run(FUSED, case, routes, tensors)
        for actual, wanted in zip(found, expert_cases.expected(case, routes, tensors, CUDA), strict=True):
            assert references.relative_error(actual, wanted) <= TOLERANCE
