"""The kernels on a CUDA device, in the format that they are made for."""

from __future__ import annotations

import pytest
import torch

from bexp.explorer.model.expert_kernels import NAMED_EXPERTS
from bexp.kernels.activations import Activation, activate
from bexp.kernels.attention import attention_backend, attention_support, default_attention_backend
from bexp.kernels.experts.capacity import ExpertsWithCapacity
from bexp.kernels.experts.expert_backend import ExpertBackend
from bexp.kernels.experts.registry import default_expert_backend, expert_backend, expert_support
from bexp.kernels.loss import float32_log_softmax
from bexp.kernels.shapes import AttentionShape, ExpertsShape
from tests.bexp.kernels import expert_cases, references
from tests.gpu.needs import one_gpu

pytestmark = one_gpu()

CUDA = torch.device("cuda")
TOLERANCE = 1e-2
ACCUMULATED_TOLERANCE = 2e-2  # gradients that pass through several operations, each rounded to bfloat16


def attention_shape(groups: int = 2, head_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
    return AttentionShape(num_heads=8, num_query_groups=groups, head_size=head_size, dtype=dtype, seq_length=256)


def experts_shape(width: int = 128, dtype: torch.dtype = torch.bfloat16) -> ExpertsShape:
    return ExpertsShape(hidden_size=256, ffn_hidden_size=width, num_experts=8, top_k=2, dtype=dtype)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "math"])
def test_attention(name: str, head_dim: int, groups: int) -> None:
    backend = attention_backend(name)
    reason = backend.unsupported_reason(attention_shape(groups=groups, head_size=head_dim), CUDA)
    if reason is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 200, 8 + 2 * groups, head_dim, generator=generator).to(torch.bfloat16)
    gradient = torch.randn(2, 8, 200, head_dim, generator=generator).to(torch.bfloat16)

    def run(leaf: torch.Tensor, attend: object, device: torch.device) -> list[torch.Tensor]:
        q, k, v = (part.transpose(1, 2) for part in leaf.split((8, groups, groups), dim=2))
        assert callable(attend)
        out = attend(q, k, v)
        out.backward(gradient.to(device, leaf.dtype))
        assert leaf.grad is not None
        return [out.detach(), *leaf.grad.split((8, groups, groups), dim=2)]

    actual = run(qkv.to(CUDA).requires_grad_(), backend.run, CUDA)
    expected = run(qkv.double().requires_grad_(), references.attention, torch.device("cpu"))
    for value, wanted in zip(actual, expected, strict=True):
        assert references.relative_error(value, wanted) <= TOLERANCE


def test_flash_pads_an_odd_head_dim() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 20, generator=generator).to(torch.bfloat16) for _ in range(3))
    out = attention_backend("flash").run(q.to(CUDA), k.to(CUDA), v.to(CUDA))
    assert references.relative_error(out, references.attention(q.double(), k.double(), v.double())) <= TOLERANCE


def test_the_default_is_usable_and_float32_has_no_flash() -> None:
    usable = {s.name for s in attention_support(attention_shape(), CUDA) if s.usable}
    assert {"flash", "efficient", "math"} <= usable
    assert default_attention_backend(attention_shape(), CUDA) in usable
    single = {s.name: s for s in attention_support(attention_shape(dtype=torch.float32), CUDA)}
    assert not single["flash"].usable
    assert not single["cudnn"].usable
    assert single["efficient"].usable
    assert "float32" in (single["flash"].reason or "")


@pytest.mark.parametrize("case", expert_cases.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["loop", "grouped_mm", "bmm"])
def test_experts(name: str, case: expert_cases.ExpertCase) -> None:
    errors = expert_cases.errors(expert_backend(name), case, torch.bfloat16, CUDA)
    assert errors["out"] <= TOLERANCE, errors
    assert max(errors.values()) <= ACCUMULATED_TOLERANCE, errors


@pytest.mark.parametrize("name", ["loop", "grouped_mm", "bmm"])
def test_experts_give_the_same_bits_twice(name: str) -> None:
    case = expert_cases.ExpertCase("large", 3000, 16, 4, hidden=128, width=192, skew=1.0)
    routes, tensors = expert_cases.problem(case, torch.bfloat16, CUDA)
    first, second = (expert_cases.run(expert_backend(name), case, routes, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_grouped_mm_never_waits_for_the_device() -> None:
    case = expert_cases.CASES[0]
    routes, tensors = expert_cases.problem(case, torch.bfloat16, CUDA)
    expert_cases.run(expert_backend("grouped_mm"), case, routes, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        expert_cases.run(expert_backend("grouped_mm"), case, routes, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_expert_support() -> None:
    reasons = {s.name: s.reason for s in expert_support(experts_shape(), CUDA) if s.name not in NAMED_EXPERTS}
    assert set(reasons.values()) == {None}, reasons
    assert default_expert_backend(experts_shape(), CUDA) == "grouped_mm"


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("gated", [True, False])
def test_activation(name: Activation, gated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(65, 64, generator=generator).to(torch.bfloat16)
    weights = torch.rand(65, generator=generator).to(torch.bfloat16)
    a, b = (t.to(CUDA).requires_grad_() for t in (x, weights))
    c, d = references.leaves((x, weights))
    out = activate(a, name, gated=gated, row_weights=b)
    wanted = references.activation(c, name, gated) * d[:, None]
    out.sum().backward()
    wanted.sum().backward()
    for value, expected in ((out, wanted), (a.grad, c.grad), (b.grad, d.grad)):
        assert references.relative_error(value, expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [999, 1024, 50257, 151936])  # torch has several kernels, by the row's length
def test_log_softmax_in_place_gives_the_bits_of_torch(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(512, vocab_size, dtype=dtype, device=CUDA)
    expected = torch.log_softmax(logits.float(), dim=-1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = float32_log_softmax(logits)
    assert torch.cuda.max_memory_allocated() - before <= (0 if dtype is torch.float32 else found.nbytes + (1 << 20))
    assert torch.equal(found, expected)


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
