"""The router's kernel against torch and float64; on the host in Triton's interpreter, started in a child process."""

from __future__ import annotations

import pytest
import torch

from bexp.kernels.router import route, score
from tests.bexp.kernels.references import assert_same_values, relative_error
from tests.bexp.kernels.triton_interpreter import is_interpreting, run_in_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not is_interpreting() else "cpu")
runs_kernels = pytest.mark.skipif(
    not is_interpreting() and DEVICE.type == "cpu", reason="needs a CUDA device, or the interpreter"
)


def problem(num_tokens: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(num_tokens, num_experts, generator=generator)
    forced = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=-1).indices
    return scores, forced, torch.randn(num_tokens, top_k, generator=generator)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=runs_kernels)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(70, 8, 2), (5, 128, 1), (33, 6, 6), (9, 1, 1)])
def test_weights_and_gradient(num_tokens: int, num_experts: int, top_k: int, norm: bool, fused: bool) -> None:
    scores, forced, gradient = problem(num_tokens, num_experts, top_k)
    leaf = scores.clone().to(DEVICE).requires_grad_()
    routes, weights = route(leaf, forced.to(DEVICE), norm_topk_prob=norm, dtype=torch.float32, fused=fused)
    assert routes.dtype is torch.int64
    assert torch.equal(routes.cpu().sort(dim=1).values, forced.sort(dim=1).values)
    scores64 = scores.double().requires_grad_()
    exponentials = torch.exp(scores64 - scores64.amax(dim=1, keepdim=True))
    wanted = (exponentials / exponentials.sum(dim=1, keepdim=True)).gather(1, routes.cpu())
    if norm:
        wanted = wanted / wanted.sum(dim=1, keepdim=True)
    assert relative_error(weights, wanted) <= 1e-6
    weights.backward(gradient.to(DEVICE))
    wanted.backward(gradient.double())
    assert leaf.grad is not None
    assert scores64.grad is not None
    # A gradient that vanishes (all experts chosen and normalised to one, or a single one) has no relative error.
    scale = wanted.detach().norm() * gradient.norm()
    assert (leaf.grad.cpu().double() - scores64.grad).norm() <= 1e-6 * scale


@pytest.mark.skipif(is_interpreting(), reason="this is the child")
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@runs_kernels
@pytest.mark.skipif(is_interpreting(), reason="the compiler's graphs are built on the device")
@pytest.mark.parametrize("norm", [False, True])
def test_within_a_graph(norm: bool) -> None:
    scores, forced, gradient = problem(64, 16, 2)
    found = []
    for run in (route, torch.compile(route, fullgraph=True, dynamic=False)):
        leaf = scores.to(DEVICE).requires_grad_()
        _, weights = run(leaf, forced.to(DEVICE), norm_topk_prob=norm, dtype=torch.float32)
        weights.backward(gradient.to(DEVICE))
        assert leaf.grad is not None
        found.append((weights.detach(), leaf.grad))
    assert_same_values(found[1], found[0])


def test_a_gradient_that_others_hold_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    h, w, given = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((6, 8), (4, 8), (6, 8)))
    h.requires_grad_()
    scores, passed = score(h, w)
    before = given.clone()
    torch.autograd.backward([scores.sum(), passed.view(48)], [None, given.view(48)])
    assert torch.equal(given, before)
    assert h.grad is not None
    assert torch.allclose(h.grad, before + w.detach().sum(0))
    scores, passed = score(h, w)
    (scores.sum() + passed.sum()).backward()  # an expanded gradient
